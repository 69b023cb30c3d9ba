// parallel_for: the library's only parallel loop.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <thread>
#include <type_traits>
#include <utility>

#include "core/integer.h"
#include "core/workers.h"

namespace ladon {

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
/// a time, so put the heavy ones first. `worker` is in [0, workers.num_threads()) and no two bodies
/// run at once with the same one: index scratch memory by it. The caller's thread takes part.
/// Rethrows the first exception after all bodies have returned. May be nested. Runs on at most
/// `threads` of the workers' threads.
template <class Body>
void parallel_for(const Workers& workers, int threads, std::int64_t count, Body&& body) {
  if (count <= 0) return;
  const int concurrent = count < threads ? static_cast<int>(count) : threads;
  if (concurrent <= 1) {
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
  workers.executor().run(
      concurrent,
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

/// The same on all of them.
template <class Body>
void parallel_for(const Workers& workers, std::int64_t count, Body&& body) {
  parallel_for(workers, workers.num_threads(), count, body);
}

/// What the thread that made it also does between the tasks of its long loops: a rank lets its
/// messages progress. Until it is destroyed; the latest one of a thread counts.
class SideWork {
 public:
  explicit SideWork(std::function<void()> work)
      : work_(std::move(work)), before_(std::exchange(of_this_thread, this)) {}
  ~SideWork() { of_this_thread = before_; }
  SideWork(const SideWork&) = delete;
  SideWork& operator=(const SideWork&) = delete;

  /// What it throws ends the loop.
  void run() const { work_(); }

  static inline thread_local const SideWork* of_this_thread = nullptr;

 private:
  const std::function<void()> work_;
  const SideWork* const before_;
};

/// Does the side work of the thread that made this, and asks the Context's check_interrupt, on that
/// thread alone.
class InterruptCheck {
 public:
  explicit InterruptCheck(const Workers& workers)
      : check_(workers.check_interrupt()),
        side_work_(SideWork::of_this_thread),
        caller_(std::this_thread::get_id()) {}

  /// Throws what they throw. On other threads: whether one has.
  bool stops() {
    if (!check_ && side_work_ == nullptr) return false;
    if (std::this_thread::get_id() != caller_) return stopped_.load(std::memory_order_relaxed);
    try {
      if (side_work_ != nullptr) side_work_->run();
      if (check_) check_();
    } catch (...) {
      stopped_.store(true, std::memory_order_relaxed);
      throw;
    }
    return false;
  }

 private:
  const std::function<void()>& check_;
  const SideWork* const side_work_;
  std::thread::id caller_;
  std::atomic<bool> stopped_{false};
};

/// parallel_for for long work into memory that is not read if it fails: an InterruptCheck runs
/// before each task but the first, and what it throws ends it. Tasks of seconds run it themselves.
template <class Body>
void interruptible_for(const Workers& workers, int threads, std::int64_t count, Body&& body) {
  InterruptCheck interrupt(workers);
  parallel_for(workers, threads, count, [&](std::int64_t task, int worker) {
    if (task != 0 && interrupt.stops()) return;
    body(task, worker);
  });
}

template <class Body>
void interruptible_for(const Workers& workers, std::int64_t count, Body&& body) {
  interruptible_for(workers, workers.num_threads(), count, body);
}

/// Calls body(begin, end, worker) for ranges of at most `grain` that together are [0, count). The
/// cuts depend on count and grain alone.
template <class Body>
void parallel_ranges(const Workers& workers, std::int64_t count, std::int64_t grain,
                     const Body& body) {
  parallel_for(workers, ceil_div(count, grain), [&](std::int64_t task, int worker) {
    body(task * grain, std::min(count, (task + 1) * grain), worker);
  });
}

/// Threads that an operation of this many multiplications, or bytes moved, is worth: waking one
/// costs as much as the work that it then takes over.
inline int useful_threads(const Workers& workers, double work) noexcept {
  constexpr double kWorkPerThread = 1 << 18;
  const double threads = work / kWorkPerThread;
  if (threads >= static_cast<double>(workers.num_threads())) return workers.num_threads();
  return threads < 1 ? 1 : static_cast<int>(threads);
}

}  // namespace ladon
