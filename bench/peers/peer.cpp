#include "peers/peer.h"

#include <chrono>
#include <cmath>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "peers/worker_source.h"

namespace ladon::bench {
namespace {

using Json = nlohmann::json;

// Thread pools of others spin for some milliseconds after their work, in the hope of more. The next
// piece of the round must not pay for that: 20 ms is past libgomp's 300,000 turns on slow CPUs.
constexpr std::chrono::milliseconds kSettle{20};

std::vector<std::string> command_of(const std::string& name, const PeerOptions& options,
                                    int threads, const std::vector<int>& cpus, DeviceId device) {
  std::vector<std::string> command{options.interpreter, "-I", "-c",
                                   kPeerWorkerSource,   name, std::to_string(threads)};
  std::string list;
  for (const int cpu : cpus) list += (list.empty() ? "" : ",") + std::to_string(cpu);
  if (!device.is_cpu()) list = device.to_string();  // no thread of it matters
  if (!list.empty()) command.push_back(list);
  return command;
}

Json request_of(const char* command, const Shape& shape) {
  return {{"command", command},
          {"pass", shape.pass == Pass::kForward ? "forward" : "backward"},
          {"dtype", name_of(shape.dtype)},
          {"batch", shape.batch},
          {"query_len", shape.query_len},
          {"kv_len", shape.kv_len},
          {"num_heads", shape.num_heads},
          {"num_kv_heads", shape.num_kv_heads},
          {"head_dim", shape.head_dim},
          {"value_dim", shape.values()},
          {"causal", shape.causal}};
}

/// What a line says, or an object of nothing.
Json parse(const std::string& line) {
  Json answer = Json::parse(line, nullptr, /*allow_exceptions=*/false);
  return answer.is_object() ? answer : Json::object();
}

/// Where the field is text.
std::optional<std::string> text_in(const Json& answer, const char* field) {
  const auto found = answer.find(field);
  if (found == answer.end() || !found->is_string()) return {};
  return found->get<std::string>();
}

std::string not_understood(const std::string& line) {
  constexpr std::size_t kShown = 60;
  return "its answer is not understood: " +
         (line.size() > kShown ? line.substr(0, kShown) + "..." : line);
}

}  // namespace

Peer::Peer(std::string name, const PeerOptions& options, int threads, const std::vector<int>& cpus,
           DeviceId device)
    : name_(std::move(name)),
      seconds_(options.seconds),
      worker_(command_of(name_, options, threads, cpus, device)) {
  const std::optional<std::string> line = worker_.read_line(seconds_);
  if (!line) return;
  const Json answer = parse(*line);
  if (const auto version = text_in(answer, "version")) {
    version_ = *version;
  } else {
    worker_.fail(text_in(answer, "problem").value_or(not_understood(*line)));
  }
}

std::string Peer::ask_for_ready(const std::string& request) {
  const std::optional<std::string> line = worker_.ask(request, seconds_);
  if (!line) return problem();
  const Json answer = parse(*line);
  if (text_in(answer, "ready")) return {};
  if (const auto why = text_in(answer, "unsupported")) return *why;
  // A problem with one case (too little memory, say) is not the end of the peer.
  if (const auto why = text_in(answer, "problem")) return *why;
  worker_.fail(not_understood(*line));
  return problem();
}

std::string Peer::prepare(const Shape& shape) {
  return ask_for_ready(request_of("prepare", shape).dump());
}

void Peer::release() { ask_for_ready(R"({"command": "release"})"); }

std::string Peer::gradients(const Shape& shape, const std::string& inputs,
                            const std::string& outputs) {
  Json request = request_of("gradients", shape);
  request["inputs"] = inputs;
  request["outputs"] = outputs;
  return ask_for_ready(request.dump());
}

std::optional<double> Peer::run_once() {
  const std::optional<std::string> line = worker_.ask(R"({"command": "run"})", seconds_);
  if (!line) return {};
  const Json answer = parse(*line);
  const auto seconds = answer.find("seconds");
  const bool good = seconds != answer.end() && seconds->is_number() && seconds->get<double>() > 0;
  if (!good || !std::isfinite(seconds->get<double>())) {
    worker_.fail(text_in(answer, "problem").value_or(not_understood(*line)));
    return {};
  }
  std::this_thread::sleep_for(kSettle);
  return seconds->get<double>();
}

Work Peer::work() {
  return {.run = {},
          .amount = 0,
          .run_elsewhere = [this] { return run_once(); },
          .process = worker_.process()};
}

std::vector<std::unique_ptr<Peer>> start_peers(const PeerOptions& options, int threads,
                                               const std::vector<int>& cpus, DeviceId device) {
  std::vector<std::unique_ptr<Peer>> peers;
  if (options.interpreter.empty()) return peers;
  const std::vector<const char*> names =
      device.is_cpu() ? std::vector<const char*>{"pytorch", "onnxruntime"}
                      : std::vector<const char*>{"pytorch", "pytorch-cudnn", "pytorch-flash"};
  for (const char* name : names) {
    peers.push_back(std::make_unique<Peer>(name, options, threads, cpus, device));
  }
  return peers;
}

}  // namespace ladon::bench
