#include "ladon/context.h"

#include <algorithm>
#include <string>

#include "core/context_impl.h"
#include "core/cpu_count.h"
#include "core/fail.h"
#include "core/parallel.h"
#include "core/thread_pool.h"
#include "cpu/dispatch.h"

namespace ladon {
namespace {

// More than any machine of today has; a larger number is a mistake that should not start threads.
constexpr int kMaxThreads = 1024;

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

Context::Impl::Impl(const ContextOptions& options)
    : executor_(options.executor),
      num_threads_(checked_num_threads(options)),
      isa_(cpu::choose_isa(options.isa)),
      kernels_(cpu::kernels_for(isa_)) {
  if (executor_ == nullptr) {
    own_executor_ = std::make_unique<ThreadPool>(num_threads_);
    executor_ = own_executor_.get();
  }
}

Context::Impl::~Impl() = default;

Context::Context() : Context(ContextOptions{}) {}
Context::Context(const ContextOptions& options) : impl_(std::make_unique<Impl>(options)) {}
Context::~Context() = default;
Context::Context(Context&&) noexcept = default;
Context& Context::operator=(Context&&) noexcept = default;

int Context::num_threads() const noexcept { return impl_->num_threads(); }
Isa Context::isa() const noexcept { return impl_->isa(); }

namespace detail {

void run_workers(const Context& context, int workers, void (*body)(void* state, int worker),
                 void* state) {
  context.impl().executor().run(workers, body, state);
}

}  // namespace detail
}  // namespace ladon
