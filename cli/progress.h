// Progress on long work: one line on stderr that is rewritten, and only where that is a terminal.
#pragma once

#include <string>

namespace ladon::cli {

class Progress {
 public:
  Progress();
  /// Wipes the line out.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// "decoding, GQA" and so on. Shown at most ten times a second unless `now`.
  void show(const std::string& text, bool now = true);
  /// Wipes the line out, so that something else can be printed.
  void clear();

 private:
  bool terminal_ = false;
  double last_ = 0;  // seconds
};

/// How far a run of so many steps is: by what it was expected to take, and then by what it takes.
class RemainingTime {
 public:
  RemainingTime(int steps, double expected_seconds);
  /// "3 of 40, about 2 min left: NAME".
  std::string begin(const std::string& name);

 private:
  int steps_;
  int begun_ = 0;
  double expected_;  // seconds of the whole
  double start_;
};

/// How long work that started when this was made still takes, by what a part of it took.
class TimeLeft {
 public:
  TimeLeft();
  /// ", about 2 min left" after this share of the work; empty in the first second.
  std::string after(double share) const;
  static std::string text(double elapsed_seconds, double share);

 private:
  double start_;
};

/// Steps that take about equally long.
class Steps {
 public:
  Steps(Progress& progress, int count) : progress_(progress), count_(count) {}
  /// Shows "NAME, about 20 s left" as the next step begins.
  void begin(const std::string& name);

 private:
  Progress& progress_;
  int count_;
  int begun_ = 0;
  TimeLeft left_{};
};

}  // namespace ladon::cli
