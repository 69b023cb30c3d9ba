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

}  // namespace ladon::cli
