#include "device_work.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace ladon::bench {
namespace {

// Of one measurement: a thousand times what enqueueing the first call and waiting for the last
// take. peers/peer_worker.py does the same.
constexpr double kLeastSeconds = 2e-2;
constexpr double kMostTimes = 200;

}  // namespace

Work work_on(const Context& context, std::function<void()> call, double amount) {
  if (context.device().is_cpu()) return {.run = std::move(call), .amount = amount};
  using Clock = std::chrono::steady_clock;
  call();
  context.synchronize();
  constexpr int kTried = 3;
  const auto begin = Clock::now();
  for (int i = 0; i < kTried; ++i) call();
  context.synchronize();
  const double seconds = std::chrono::duration<double>(Clock::now() - begin).count() / kTried;
  const int times = static_cast<int>(std::clamp(kLeastSeconds / seconds, 1.0, kMostTimes));
  Work work;
  work.amount = amount;
  work.times = times;
  work.run = [&context, call = std::move(call), times] {
    for (int i = 0; i < times; ++i) call();
    context.synchronize();
  };
  return work;
}

}  // namespace ladon::bench
