#include "interrupt.h"

#include <nanobind/nanobind.h>
#include <time.h>  // NOLINT(modernize-deprecated-headers): clock_gettime
#include <unistd.h>

#include <atomic>
#include <cstdint>

namespace ladon::python {
namespace {

namespace nb = nanobind;

// Taking the GIL from a busy thread of Python's takes up to 5 ms (sys.getswitchinterval()).
constexpr std::int64_t kIntervalMs = 100;

thread_local bool handling = false;

/// The coarse clock, which moves every few milliseconds, is read in a few nanoseconds.
std::int64_t now_ms() noexcept {
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return std::int64_t{now.tv_sec} * 1000 + now.tv_nsec / 1'000'000;
}

}  // namespace

void check_signals() {
  static std::atomic<std::int64_t> next{0};
  const std::int64_t now = now_ms();
  if (now < next.load(std::memory_order_relaxed)) return;
  if (gettid() != getpid()) return;  // handlers run in the main thread alone
  next.store(now + kIntervalMs, std::memory_order_relaxed);
  const nb::gil_scoped_acquire gil;
  if (handling) return;
  handling = true;
  const int raised = PyErr_CheckSignals();
  handling = false;
  if (raised != 0) throw nb::python_error();
}

bool in_signal_handler() noexcept { return handling; }

}  // namespace ladon::python
