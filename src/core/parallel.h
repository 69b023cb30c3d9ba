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
  } state{&body, count, {}, {}, {}};
  detail::run_workers(
      context, workers,
      [](void* opaque, int worker) {
        State& shared = *static_cast<State*>(opaque);
        try {
          for (;;) {
            const std::int64_t task = shared.next.fetch_add(1, std::memory_order_relaxed);
            if (task >= shared.count || shared.failed.load(std::memory_order_relaxed)) return;
            (*shared.body)(task, worker);
          }
        } catch (...) {
          if (!shared.failed.exchange(true)) shared.error = std::current_exception();
        }
      },
      &state);
  if (state.error) std::rethrow_exception(state.error);
}

}  // namespace ladon
