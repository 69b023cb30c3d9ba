// Keeps each thread of a Context on a CPU of its own while it is measured.
//
// Schedulers may wake a thread on the CPU of the one that woke it, and leave both there for seconds
// while another CPU idles (virtual machines that pack their CPUs do this on purpose). A ceiling and
// a case that were placed differently cannot be compared.
#pragma once

#include <sched.h>

#include "ladon/context.h"

namespace ladon::bench {

/// Pins the context's threads, the caller's included, and releases the caller's at the end. Only
/// where the context has one thread for each CPU that the process may use: with fewer, the system
/// knows better which CPUs share a core. Failing to pin is no error.
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
