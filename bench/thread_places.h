// For programs that time Ladon and other libraries, with their own thread pools, in one process.
#pragma once

#include <functional>
#include <set>
#include <vector>

#include "timing.h"

namespace ladon::bench {

/// Keeps every library's threads on separate CPUs: a scheduler may leave two that work together
/// on one CPU for seconds. Each library is expected to have as many threads as there are CPUs, the
/// main one among them.
class ThreadPlaces {
 public:
  explicit ThreadPlaces(std::vector<int> cpus);
  /// Pins the threads that have come since the last call: the first, then those of one library.
  void pin_new_threads();

 private:
  std::vector<int> cpus_;
  std::set<int> pinned_;
};

/// A call that takes turns with others. It waits first: thread pools spin for a while after their
/// work, OpenBLAS's for 2^26 cycles.
Work after_a_pause(std::function<void()> call);

}  // namespace ladon::bench
