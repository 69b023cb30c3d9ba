// Random combinations of all options on a GPU, against the double reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_test.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class CudaRandomCases : public CudaTest {};

// Several threads with a Context each: the reference on the host is what takes the time.
TEST_F(CudaRandomCases, FiveThousandAreRight) {
  constexpr int kCases = 5000;
  std::atomic<int> next = 0;
  std::mutex mutex;
  std::vector<std::string> wrong;
  Ratios worst;
  const auto work = [&] {
    const Context own = cuda_context();
    Ratios ratios;
    for (int i = next++; i < kCases; i = next++) {
      Random random(20261116, static_cast<std::uint64_t>(i));
      Case problem = random_case(random);
      if (i % 5 == 0) make_shard(random, problem);
      const CaseData data(problem);
      const std::string message = check_case(own, data, truth_of(data), &ratios);
      if (message.empty()) continue;
      const std::lock_guard lock(mutex);
      wrong.push_back("case " + std::to_string(i) + ": " + message);
      if (wrong.size() >= 10) next = kCases;
    }
    const std::lock_guard lock(mutex);
    worst.keep_worst(ratios);
  };
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1U, 8U);
  for (unsigned i = 0; i < count; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<std::string>());
  std::printf("%d cases; worst errors as multiples of their bounds: %s\n", kCases,
              worst.describe().c_str());
}

}  // namespace
}  // namespace ladon::test
