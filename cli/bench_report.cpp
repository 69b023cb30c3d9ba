#include "bench_report.h"

#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

#include "ladon/version.h"
#include "machine.h"
#include "text_table.h"

namespace ladon::cli {
namespace {

using bench::Exponent;
using bench::Fault;
using bench::GradientErrors;
using bench::Limit;
using bench::Neighbour;
using bench::PeerState;
using bench::PeerTiming;
using bench::Row;
using bench::Scaling;

const char* unit_of(Limit limit) { return limit == Limit::kMemory ? "GB/s" : "GFLOP/s"; }

/// Where others had the CPUs, numbers say nothing about a target.
const char* verdict(bool met, bool disturbed) {
  if (disturbed) return "";
  return met ? ": met" : ": missed";
}

void print_scaling(const Scaling& scaling) {
  std::printf(
      "%-9s %-52s %d threads are %.2f times as fast as 1 (the ceiling: %.2f)  target %.1f%s%s\n",
      scaling.isa.c_str(), scaling.name.c_str(), scaling.threads, scaling.speedup,
      scaling.ceiling_speedup, scaling.target,
      verdict(scaling.speedup >= scaling.target, scaling.disturbed),
      scaling.disturbed ? "  disturbed" : "");
}

void print_exponent(const Exponent& exponent) {
  std::printf("%-62s length^%.2f (expected %.0f)%s\n", exponent.name.c_str(), exponent.exponent,
              exponent.expected, exponent.disturbed ? "  disturbed" : "");
}

void print_neighbour(const Neighbour& neighbour) {
  std::printf("%-9s %-52s %5.1f%% of the share of %s  target %.0f%%%s%s\n", neighbour.isa.c_str(),
              neighbour.name.c_str(), 100 * neighbour.ratio, neighbour.of.c_str(),
              100 * neighbour.target,
              verdict(neighbour.ratio >= neighbour.target, neighbour.disturbed),
              neighbour.disturbed ? "  disturbed" : "");
}

/// "pytorch 1.42x (target 1.3x: met)".
void print_ratio(const Row& row, const PeerTiming& peer) {
  if (!peer.measured()) {
    std::printf("  %s -", peer.peer.c_str());
    return;
  }
  std::printf("  %s %.2fx", peer.peer.c_str(), row.ratio(peer));
  if (row.pytorch_target && peer.peer == "pytorch") {
    std::printf(" (target %.1fx%s)", *row.pytorch_target,
                verdict(row.ratio(peer) >= *row.pytorch_target, row.disturbed));
  }
}

void print_gradient(const GradientErrors& errors) {
  std::printf("%-52s %s  Ladon %.2e  PyTorch %.2e  %s\n", errors.name.c_str(),
              errors.gradient.c_str(), errors.ladon, errors.pytorch,
              errors.ladon <= errors.pytorch ? "no larger: met" : "larger: missed");
}

/// The ratio to PyTorch, where it was measured.
std::optional<double> pytorch_ratio(const Row& row) {
  for (const PeerTiming& peer : row.peers) {
    if (peer.peer == "pytorch" && peer.measured()) return row.ratio(peer);
  }
  return {};
}

std::string fixed(double value, int digits, const char* unit) {
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.*f%s", digits, value, unit);
  return text.data();
}

/// "share missed, ratio missed"; "met"; or why there is nothing to say.
std::string judgement(const Row& row, std::optional<double> ratio) {
  std::string words;
  const auto add = [&](const std::string& more) { words += (words.empty() ? "" : "; ") + more; };
  if (row.disturbed) {
    add("disturbed");
  } else {
    if (row.target && row.share() < *row.target) add("share missed");
    if (row.pytorch_target && ratio && *ratio < *row.pytorch_target) add("ratio missed");
    if (words.empty() && (row.target || (row.pytorch_target && ratio))) add("met");
  }
  if (!row.target_does_not_apply.empty()) add(row.target_does_not_apply);
  return words;
}

/// The rows that have targets, once more: what was aimed at, and what was measured.
void print_targets(const std::vector<Row>& rows) {
  TextTable table({{"kernels", Align::kLeft},
                   {"case", Align::kLeft},
                   {"share"},
                   {"target"},
                   {"of"},
                   {"over PyTorch"},
                   {"target"},
                   {"", Align::kLeft}});
  int targets = 0;
  for (const Row& row : rows) {
    const bool shared = row.target || !row.target_does_not_apply.empty();
    if (!shared && !row.pytorch_target) continue;
    ++targets;
    const std::optional<double> ratio = pytorch_ratio(row);
    table.add({row.isa, row.name, fixed(100 * row.share(), 1, "%"),
               row.target ? fixed(100 * *row.target, 0, "%") : "-", name_of(row.limit),
               ratio ? fixed(*ratio, 2, "x") : "-",
               row.pytorch_target ? fixed(*row.pytorch_target, 1, "x") : "-",
               judgement(row, ratio)});
  }
  if (targets > 0) std::printf("\nTargets\n%s", table.text().c_str());
}

template <class One>
void print_group(const char* title, const std::vector<One>& list, void (*print)(const One&)) {
  if (list.empty()) return;
  std::printf("\n%s\n", title);
  for (const One& one : list) print(one);
}

}  // namespace

std::string machine_line(DeviceId device, int threads) {
  return std::string("Ladon ") + version() + ", built by " + compiler_name() + "; " +
         device_name(device) + ", " + std::to_string(threads) +
         (threads == 1 ? " thread" : " threads");
}

void print_bench_head(const std::string& machine) {
  std::printf("%s\n", machine.c_str());
  std::printf(
      "Ceilings: arithmetic, or memory read, measured in turns with the case. K and V count "
      "once.\n");
}

void print_bench_columns() {
  std::printf("\n%-9s %-52s %10s %10s %9s %-8s %8s %-6s %7s\n", "kernels", "case", "median ms",
              "p10 ms", "rate", "", "ceiling", "", "share");
}

void print_bench_row(const Row& row) {
  std::printf("%-9s %-52s %10.2f %10.2f %9.1f %-8s %8.1f %-6s %6.1f%%", row.isa.c_str(),
              row.name.c_str(), row.timing.median_ms, row.timing.p10_ms, row.timing.rate / 1e9,
              unit_of(row.limit), row.ceiling.rate / 1e9, name_of(row.limit), 100 * row.share());
  if (row.target) {
    std::printf("  target %.0f%%%s", 100 * *row.target,
                verdict(row.share() >= *row.target, row.disturbed));
  }
  if (!row.target_does_not_apply.empty()) {
    std::printf("  target %s", row.target_does_not_apply.c_str());
  }
  for (const PeerTiming& peer : row.peers) print_ratio(row, peer);
  if (row.disturbed) std::printf("  disturbed: the CPUs are busy");
  std::printf("\n");
  std::fflush(stdout);
}

void print_bench_fault(const Fault& fault) {
  std::printf("%-9s %-52s WRONG: %s\n", fault.isa.c_str(), fault.name.c_str(), fault.what.c_str());
  std::fflush(stdout);
}

void print_bench_peer(const PeerState& peer) {
  if (peer.problem.empty()) {
    std::printf("%s %s is measured alongside Ladon\n", peer.peer.c_str(), peer.version.c_str());
  } else {
    std::printf("%s is left out%s: %s\n", peer.peer.c_str(),
                peer.version.empty() ? "" : " from here on", peer.problem.c_str());
  }
  std::fflush(stdout);
}

void print_bench_rest(const bench::BenchmarkResults& results) {
  print_targets(results.rows);
  print_group("Threads", results.scaling, print_scaling);
  print_group("Time over length", results.exponents, print_exponent);
  print_group("Neighbouring shapes", results.neighbours, print_neighbour);
  print_group("Largest errors of bf16 gradients against the f64 reference, same inputs",
              results.gradients, print_gradient);
}

}  // namespace ladon::cli
