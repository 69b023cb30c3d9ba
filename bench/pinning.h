// Keeps each thread of a Context on its own CPU while it is measured.
//
// Schedulers may wake a thread on the CPU of the one that woke it, and leave both there for seconds
// while another CPU idles (virtual machines that pack their CPUs do this on purpose). A ceiling and
// a case that were placed differently cannot be compared.
#pragma once

#include <sched.h>

#include <vector>

#include "ladon/context.h"

namespace ladon::bench {

/// The CPUs that a context's threads are pinned to, one each; none where they are not: with fewer
/// threads than CPUs that the process may use, the system knows better which CPUs share a core.
std::vector<int> cpus_to_pin(const Context& context);

/// Keeps one thread of this process, by its number, on one CPU; 0 stands for the caller's.
void pin_thread(int thread, int cpu);

/// Pins the context's threads, the caller's included, and releases the caller's at the end, where
/// cpus_to_pin() names CPUs. Failing to pin is not an error.
class PinnedThreads {
 public:
  explicit PinnedThreads(const Context& context);
  ~PinnedThreads();
  PinnedThreads(const PinnedThreads&) = delete;
  PinnedThreads& operator=(const PinnedThreads&) = delete;

 private:
  cpu_set_t before_{};
  bool pinned_ = false;
};

}  // namespace ladon::bench
