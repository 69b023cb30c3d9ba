// parallel_for: the library's only parallel loop.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <type_traits>

#include "ladon/context.h"

namespace ladon {

namespace detail {
/// Runs body(state, worker) for worker in [0, workers), workers <= context.num_threads().
void run_workers(const Context& context, int workers, void (*body)(void* state, int worker),
                 void* state);
}  // namespace detail

/// How numbers are rounded and whether subnormals count. Workers take over the caller's, so that a
/// result does not depend on which thread made it.
class FloatEnvironment {
 public:
#if defined(__SSE__)
  static FloatEnvironment current() noexcept { return FloatEnvironment(__builtin_ia32_stmxcsr()); }
  void apply() const noexcept { __builtin_ia32_ldmxcsr(control_); }

 private:
  explicit FloatEnvironment(unsigned control) : control_(control) {}
  unsigned control_;
#else
  static FloatEnvironment current() noexcept { return {}; }
  void apply() const noexcept {}
#endif
};

/// Calls body(task, worker) once for each task in [0, count). Tasks are handed out in order, one at
/// a time, so put the heavy ones first. `worker` is in [0, context.num_threads()) and no two bodies
/// run at once with the same one: index scratch memory by it. The caller's thread takes part.
/// Rethrows the first exception after all bodies have returned. May be nested.
template <class Body>
void parallel_for(const Context& context, std::int64_t count, Body&& body) {
  if (count <= 0) return;
  const int threads = context.num_threads();
  const int workers = count < threads ? static_cast<int>(count) : threads;
  if (workers <= 1) {
    for (std::int64_t task = 0; task < count; ++task) body(task, 0);
    return;
  }
  struct State {
    std::remove_reference_t<Body>* body;
    std::int64_t count;
    std::atomic<std::int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    FloatEnvironment environment;  // the caller's
  } state{&body, count, {}, {}, {}, FloatEnvironment::current()};
  detail::run_workers(
      context, workers,
      [](void* opaque, int worker) {
        State& shared = *static_cast<State*>(opaque);
        const FloatEnvironment own = FloatEnvironment::current();
        shared.environment.apply();
        try {
          for (;;) {
            const std::int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed);
            if (task >= shared.count || shared.failed.load(std::memory_order_relaxed)) break;
            (*shared.body)(task, worker);
          }
        } catch (...) {
          if (!shared.failed.exchange(true)) shared.error = std::current_exception();
        }
        own.apply();
      },
      &state);
  if (state.error) std::rethrow_exception(state.error);
}

}  // namespace ladon
