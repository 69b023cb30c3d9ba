// Repeated timing of pieces of work that take turns.
//
// On a shared machine the clock and the neighbours change from second to second. Pieces that are to
// be compared are therefore run in rounds, one after another, and only then summed up; and rounds
// in which our threads had to wait for a CPU are left out.
#pragma once

#include <functional>
#include <optional>
#include <vector>

namespace ladon::bench {

/// One piece of work, and how much it is: flops, or bytes.
struct Work {
  std::function<void()> run;
  double amount = 0;
  /// In place of run, for work that has its own clock, such as another process: does it once
  /// and gives the seconds, or nothing where it failed and is not to be tried again.
  std::function<std::optional<double>()> run_elsewhere{};
  int process = 0;  // that does run_elsewhere; 0: this one
  int times = 1;    // that run() does it in a row: the time of one is counted
};

/// Rounds go on until both minima are met by undisturbed ones, or until the time is up; there are 3
/// at least, where so many are requested.
struct TimingLimits {
  double min_seconds = 1;  // of the first piece
  int min_rounds = 7;
  double max_seconds = 12;  // of everything
};

struct Timing {
  double median_ms = 0;
  double p10_ms = 0;
  double rate = 0;  // amount per second at the median
  int repetitions = 0;
};

struct TimedPieces {
  std::vector<Timing> pieces;  // one for each piece of work; no repetitions: it failed
  /// Undisturbed rounds were too few: all rounds are counted, and mean little.
  bool disturbed = false;
};

/// The value that `fraction` of the sorted samples do not reach, between two of them linearly.
double quantile(std::vector<double> samples, double fraction);

/// Runs all pieces once to warm up, then in rounds.
TimedPieces time_in_turns(const std::vector<Work>& pieces, const TimingLimits& limits);

}  // namespace ladon::bench
