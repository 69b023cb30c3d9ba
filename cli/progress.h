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

}  // namespace ladon::cli
