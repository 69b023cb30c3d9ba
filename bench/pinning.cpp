#include "pinning.h"

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "core/context_impl.h"
#include "core/parallel.h"

namespace ladon::bench {
namespace {

std::vector<int> cpus_of(const cpu_set_t& set) {
  std::vector<int> cpus;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (CPU_ISSET(static_cast<std::size_t>(cpu), &set)) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

void pin_thread(int thread, int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<std::size_t>(cpu), &set);
  sched_setaffinity(thread, sizeof set, &set);
}

std::vector<int> cpus_to_pin(const Context& context) {
  const int threads = context.num_threads();
  cpu_set_t set;
  if (!context.device().is_cpu() || threads < 2 || sched_getaffinity(0, sizeof set, &set) != 0)
    return {};
  std::vector<int> cpus = cpus_of(set);
  if (cpus.size() != static_cast<std::size_t>(threads)) return {};
  return cpus;
}

PinnedThreads::PinnedThreads(const Context& context) {
  const int threads = context.num_threads();
  const std::vector<int> cpus = cpus_to_pin(context);
  if (cpus.empty() || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
  pinned_ = true;

  // Each body waits for all others, so that every thread takes exactly one. A pool that could not
  // start all its threads would wait forever: hence the limit.
  std::atomic<int> arrived{0};
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  parallel_for(context.impl().workers(), threads, [&](std::int64_t task, int) {
    arrived.fetch_add(1);
    while (arrived.load() < threads && std::chrono::steady_clock::now() < limit) {
      std::this_thread::yield();
    }
    pin_thread(0, cpus[static_cast<std::size_t>(task)]);
  });
}

PinnedThreads::~PinnedThreads() {
  if (pinned_) sched_setaffinity(0, sizeof before_, &before_);
}

}  // namespace ladon::bench
