#include "core/workers.h"

#include <algorithm>
#include <string>

#include "core/cpu_count.h"
#include "core/fail.h"
#include "core/thread_pool.h"

namespace ladon {
namespace {

int checked_num_threads(const ContextOptions& options) {
  if (options.executor != nullptr) {
    const int concurrency = options.executor->concurrency();
    if (concurrency < 1) {
      fail("Context", "executor",
           "got a concurrency() of " + std::to_string(concurrency) + ", expected 1 or more");
    }
    return concurrency;
  }
  if (options.num_threads < 0 || options.num_threads > kMaxThreads) {
    fail("Context", "num_threads",
         "got " + std::to_string(options.num_threads) + ", expected 0 (all that may be used) to " +
             std::to_string(kMaxThreads));
  }
  if (options.num_threads != 0) return options.num_threads;
  return std::min(usable_cpu_count(), kMaxThreads);
}

}  // namespace

Workers::Workers(const ContextOptions& options)
    : num_threads_(checked_num_threads(options)),
      own_executor_(options.executor == nullptr ? std::make_unique<ThreadPool>(num_threads_)
                                                : nullptr),
      executor_(options.executor == nullptr ? own_executor_.get() : options.executor),
      check_interrupt_(options.check_interrupt) {}

}  // namespace ladon
