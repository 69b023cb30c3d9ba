#include "bench_document.h"

#include <ctime>
#include <string>

#include "machine.h"

namespace ladon::cli {
namespace {

using bench::Exponent;
using bench::Fault;
using bench::GradientErrors;
using bench::Neighbour;
using bench::PeerState;
using bench::PeerTiming;
using bench::Row;
using bench::Scaling;

std::string utc_date() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  gmtime_r(&now, &parts);
  char text[32];
  return {text, std::strftime(text, sizeof text, "%Y-%m-%d", &parts)};
}

/// Adds what is known of the peers: ratios, their times, and why there are none.
void add_peers(Json& json, const Row& row) {
  json["ratio"] = Json::object();
  if (row.pytorch_target) json["ratio_target"] = {{"pytorch", *row.pytorch_target}};
  for (const PeerTiming& peer : row.peers) {
    if (peer.measured()) {
      json["ratio"][peer.peer] = row.ratio(peer);
      json["peer_median_ms"][peer.peer] = peer.timing.median_ms;
    } else {
      json["not_measured"][peer.peer] = peer.why_not;
    }
  }
}

Json row_json(const Row& row) {
  const bool compute = !counts_bytes(row.limit);
  Json json;
  json["name"] = row.name;
  json["isa"] = row.isa;
  json["threads"] = row.threads;
  json["share"] = row.share();
  if (row.target) json["target"] = *row.target;
  if (!row.target_does_not_apply.empty()) json["target_note"] = row.target_does_not_apply;
  json["median_ms"] = row.timing.median_ms;
  json["p10_ms"] = row.timing.p10_ms;
  json["disturbed"] = row.disturbed;
  json["repetitions"] = row.timing.repetitions;
  json[compute ? "gflops" : "gbps"] = row.timing.rate / 1e9;
  json["ceiling"] = name_of(row.limit);
  json[compute ? "ceiling_gflops" : "ceiling_gbps"] = row.ceiling.rate / 1e9;
  add_peers(json, row);
  return json;
}

Json scaling_json(const Scaling& scaling) {
  return {{"name", scaling.name},
          {"isa", scaling.isa},
          {"threads", scaling.threads},
          {"speedup", scaling.speedup},
          {"ceiling_speedup", scaling.ceiling_speedup},
          {"target", scaling.target},
          {"disturbed", scaling.disturbed}};
}

Json exponent_json(const Exponent& exponent) {
  Json json{{"name", exponent.name},
            {"exponent", exponent.exponent},
            {"expected", exponent.expected},
            {"points", Json::array()},
            {"disturbed", exponent.disturbed}};
  for (const Exponent::Point& point : exponent.points) {
    json["points"].push_back({{"length", point.length}, {"median_ms", point.median_ms}});
  }
  return json;
}

Json neighbour_json(const Neighbour& neighbour) {
  return {{"name", neighbour.name},     {"of", neighbour.of},
          {"isa", neighbour.isa},       {"ratio", neighbour.ratio},
          {"target", neighbour.target}, {"disturbed", neighbour.disturbed}};
}

Json peer_json(const PeerState& peer) {
  Json json{{"name", peer.peer}};
  if (!peer.version.empty()) json["version"] = peer.version;
  if (!peer.problem.empty()) json["problem"] = peer.problem;
  return json;
}

Json gradient_json(const GradientErrors& errors) {
  return {{"name", errors.name},
          {"gradient", errors.gradient},
          {"ladon", errors.ladon},
          {"pytorch", errors.pytorch}};
}

Json fault_json(const Fault& fault) {
  return {{"name", fault.name}, {"isa", fault.isa}, {"what", fault.what}};
}

Json rank_row_json(const bench::RankRow& row) {
  Json json{{"scheme", row.scheme},        {"pass", row.backward ? "backward" : "forward"},
            {"ranks", row.ranks},          {"tokens", row.tokens},
            {"sent_bytes", row.sent},      {"formula_bytes", row.expected},
            {"ms", 1e3 * row.seconds},     {"predicted_ms", 1e3 * row.predicted},
            {"overlap", row.overlap},      {"imbalance", row.imbalance},
            {"efficiency", row.efficiency}};
  if (!row.fault.empty()) json["fault"] = row.fault;
  return json;
}

template <class List, class ToJson>
Json array_of(const List& list, const ToJson& to_json) {
  Json array = Json::array();
  for (const auto& one : list) array.push_back(to_json(one));
  return array;
}

}  // namespace

Json rank_bench_document(const std::vector<bench::RankRow>& rows, const bench::Link& link,
                         int ranks, bool quick, Isa isa) {
  Json document = json_document("bench");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["isa"] = name_of(isa);
  document["date"] = utc_date();
  document["quick"] = quick;
  document["ranks"] = {{"count", ranks},
                       {"link", link.name},
                       {"latency", link.latency},
                       {"bandwidth", link.bandwidth},
                       {"rows", array_of(rows, rank_row_json)}};
  return document;
}

Json bench_document(const bench::BenchmarkResults& results, bool quick, DeviceId device,
                    int threads) {
  Json document = json_document("bench");
  document["compiler"] = compiler_name();
  document["cpu"] = cpu_name();
  document["device"] = device.to_string();
  if (!device.is_cpu()) document["gpu"] = device_name(device);
  document["threads"] = threads;
  document["date"] = utc_date();
  document["quick"] = quick;
  document["rows"] = array_of(results.rows, row_json);
  document["faults"] = array_of(results.faults, fault_json);
  document["scaling"] = array_of(results.scaling, scaling_json);
  document["exponents"] = array_of(results.exponents, exponent_json);
  document["neighbours"] = array_of(results.neighbours, neighbour_json);
  document["peers"] = array_of(results.peers, peer_json);
  document["gradients"] = array_of(results.gradients, gradient_json);
  return document;
}

}  // namespace ladon::cli
