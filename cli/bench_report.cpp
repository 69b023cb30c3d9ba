#include "bench_report.h"

#include <array>
#include <cstdio>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "ladon/version.h"
#include "machine.h"
#include "terminal.h"
#include "text_table.h"
#include "units.h"

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

// Narrower terminals get the case, its time and its share alone.
constexpr int kWideTable = 130;

const char* unit_of(Limit limit) { return counts_bytes(limit) ? "GB/s" : "GFLOP/s"; }

/// Where others had the CPUs, numbers say nothing about a target.
const char* verdict(bool met, bool disturbed) {
  if (disturbed) return "";
  return met ? ": met" : ": missed";
}

/// "met", "missed", or that others had the CPUs.
std::string outcome(bool met, bool disturbed) {
  if (disturbed) return "disturbed";
  return met ? "met" : "missed";
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
  TextTable table({{"kernels", Align::kLeft, false},
                   {"case", Align::kLeft},
                   {"share"},
                   {"target", Align::kRight, false},
                   {"of", Align::kRight, false},
                   {"over PyTorch", Align::kRight, false},
                   {"target", Align::kRight, false},
                   {"", Align::kLeft, false}});
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

/// A table under its title, unless it is empty.
template <class One, class Cells>
void print_group(const char* title, std::vector<Column> columns, const std::vector<One>& list,
                 const Cells& cells_of) {
  if (list.empty()) return;
  TextTable table(std::move(columns));
  for (const One& one : list) table.add(cells_of(one));
  std::printf("\n%s\n%s", title, table.text().c_str());
}

std::vector<std::string> cells_of_scaling(const Scaling& one) {
  return {one.isa,
          one.name,
          std::to_string(one.threads),
          fixed(one.speedup, 2, "x"),
          fixed(one.ceiling_speedup, 2, "x"),
          fixed(one.target, 1, "x"),
          outcome(one.speedup >= one.target, one.disturbed)};
}

std::vector<std::string> cells_of_exponent(const Exponent& one) {
  return {one.name, "length^" + fixed(one.exponent, 2, ""), fixed(one.expected, 0, ""),
          one.disturbed ? "disturbed" : ""};
}

std::vector<std::string> cells_of_neighbour(const Neighbour& one) {
  return {one.isa,
          one.name,
          fixed(100 * one.ratio, 1, "%"),
          one.of,
          fixed(100 * one.target, 0, "%"),
          outcome(one.ratio >= one.target, one.disturbed)};
}

std::vector<std::string> cells_of_gradient(const GradientErrors& one) {
  const auto scientific = [](double value) {
    std::array<char, 32> text{};
    std::snprintf(text.data(), text.size(), "%.2e", value);
    return std::string(text.data());
  };
  return {one.name, one.gradient, scientific(one.ladon), scientific(one.pytorch),
          one.ladon <= one.pytorch ? "no larger: met" : "larger: missed"};
}

}  // namespace

std::string machine_line(DeviceId device, int threads) {
  return std::string("Ladon ") + version() + ", built by " + compiler_name() + "; " +
         device_name(device) + ", " + std::to_string(threads) +
         (threads == 1 ? " thread" : " threads");
}

void print_bench_head(const std::string& machine, int count, double seconds) {
  std::printf("%s\n", machine.c_str());
  std::printf(
      "Ceilings (arithmetic, or reading memory) are measured in turns with each case;\n"
      "K and V count once.\n");
  std::printf("%d measurement%s: about %s\n", count, count == 1 ? "" : "s",
              format_duration(seconds).c_str());
  std::fflush(stdout);
}

void BenchTable::begin() {
  if (begun_) return;
  begun_ = true;
  const auto width = terminal_width();
  narrow_ = width && *width < kWideTable;
  if (narrow_) {
    std::printf("\n%-51s %9s %7s\n", "case", "median ms", "share");
  } else {
    std::printf("\n%-11s %-52s %10s %10s %9s %-8s %8s %-6s %7s\n", "kernels", "case", "median ms",
                "p10 ms", "rate", "", "ceiling", "", "share");
  }
}

/// Kernels have a separate line where a column has no space.
void BenchTable::begin_kernels(const std::string& kernels) {
  begin();
  if (narrow_ && kernels != kernels_) std::printf("%s kernels\n", kernels.c_str());
  kernels_ = kernels;
}

void BenchTable::print(const Row& row) {
  begin_kernels(row.isa);
  if (narrow_) {
    std::printf("%-51s %9.2f %6.1f%%", row.name.c_str(), row.timing.median_ms, 100 * row.share());
    const auto ratio = pytorch_ratio(row);
    if (ratio) std::printf(" %6.2fx", *ratio);
    std::printf("%s\n", row.disturbed ? " *" : "");
    std::fflush(stdout);
    return;
  }
  std::printf("%-11s %-52s %10.2f %10.2f %9.1f %-8s %8.1f %-6s %6.1f%%", row.isa.c_str(),
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

void BenchTable::print(const Fault& fault) {
  begin_kernels(fault.isa);
  if (narrow_) {
    std::printf("%s\n  WRONG: %s\n", fault.name.c_str(), fault.what.c_str());
  } else {
    std::printf("%-11s %-52s WRONG: %s\n", fault.isa.c_str(), fault.name.c_str(),
                fault.what.c_str());
  }
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
  print_group("Threads",
              {{"kernels", Align::kLeft, false},
               {"case", Align::kLeft},
               {"threads"},
               {"speedup"},
               {"ceiling", Align::kRight, false},
               {"target", Align::kRight, false},
               {"", Align::kLeft}},
              results.scaling, cells_of_scaling);
  print_group("Time over length",
              {{"case", Align::kLeft},
               {"time grows as"},
               {"expected", Align::kRight, false},
               {"", Align::kLeft}},
              results.exponents, cells_of_exponent);
  print_group("Neighbouring shapes",
              {{"kernels", Align::kLeft, false},
               {"case", Align::kLeft},
               {"of its share"},
               {"the share of", Align::kLeft, false},
               {"target", Align::kRight, false},
               {"", Align::kLeft}},
              results.neighbours, cells_of_neighbour);
  print_group("Largest errors of bf16 gradients against the f64 reference, same inputs",
              {{"case", Align::kLeft}, {""}, {"Ladon"}, {"PyTorch"}, {"", Align::kLeft}},
              results.gradients, cells_of_gradient);
}

}  // namespace ladon::cli
