#include "timing.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>

namespace ladon::bench {
namespace {

using Clock = std::chrono::steady_clock;

// A round counts when our threads together waited no longer than this part of it.
constexpr double kMostWaiting = 0.05;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// How long a process's threads have been ready to run without a CPU. 0 where the system does not
/// tell. 0 stands for this process.
double seconds_waited(int process) {
  const std::string name = process == 0 ? "self" : std::to_string(process);
  double total = 0;
  std::error_code error;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/" + name + "/task", error)) {
    std::ifstream file(thread.path() / "schedstat");
    double ran = 0;
    double waited = 0;
    if (file >> ran >> waited) total += waited * 1e-9;
  }
  return total;
}

struct Round {
  std::vector<std::optional<double>> seconds;  // of each piece; empty: it failed
  bool disturbed = false;
};

/// Empty where it failed.
std::optional<double> run_once(const Work& piece) {
  if (piece.run_elsewhere) return piece.run_elsewhere();
  const Clock::time_point begin = Clock::now();
  piece.run();
  return seconds_since(begin) / piece.times;
}

/// `failed` marks the pieces that are not run any more.
Round run_round(const std::vector<Work>& pieces, std::vector<bool>& failed) {
  Round round;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    round.seconds.emplace_back();
    if (failed[i]) continue;
    const double waited = seconds_waited(pieces[i].process);
    const std::optional<double> seconds = run_once(pieces[i]);
    round.seconds.back() = seconds;
    if (!seconds) {
      failed[i] = true;
    } else if (seconds_waited(pieces[i].process) - waited >
               kMostWaiting * *seconds * pieces[i].times) {
      round.disturbed = true;
    }
  }
  return round;
}

}  // namespace

double quantile(std::vector<double> samples, double fraction) {
  if (samples.empty()) return 0;
  std::sort(samples.begin(), samples.end());
  const double position = fraction * static_cast<double>(samples.size() - 1);
  const std::size_t below = static_cast<std::size_t>(position);
  const std::size_t above = std::min(below + 1, samples.size() - 1);
  const double part = position - static_cast<double>(below);
  return samples[below] + part * (samples[above] - samples[below]);
}

TimedPieces time_in_turns(const std::vector<Work>& pieces, const TimingLimits& limits) {
  const Clock::time_point begin = Clock::now();
  std::vector<bool> failed(pieces.size(), false);
  run_round(pieces, failed);  // to warm up

  const int least_rounds = std::min(limits.min_rounds, 3);
  std::vector<Round> rounds;
  int good_rounds = 0;
  double good_seconds = 0;
  while (good_rounds < limits.min_rounds || good_seconds < limits.min_seconds) {
    const bool enough = rounds.size() >= static_cast<std::size_t>(least_rounds);
    if (enough && seconds_since(begin) > limits.max_seconds) break;
    rounds.push_back(run_round(pieces, failed));
    if (rounds.back().disturbed) continue;
    ++good_rounds;
    good_seconds += rounds.back().seconds[0].value_or(0);
  }

  TimedPieces result;
  result.disturbed = good_rounds < least_rounds;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    std::vector<double> seconds;
    for (const Round& round : rounds) {
      const bool counts = !failed[i] && (result.disturbed || !round.disturbed);
      if (counts && round.seconds[i]) seconds.push_back(*round.seconds[i]);
    }
    if (seconds.empty()) {
      result.pieces.emplace_back();
      continue;
    }
    const double median = quantile(seconds, 0.5);
    result.pieces.push_back({median * 1e3, quantile(seconds, 0.1) * 1e3, pieces[i].amount / median,
                             static_cast<int>(seconds.size())});
  }
  return result;
}

}  // namespace ladon::bench
