// Random combinations of all options on a GPU, against the double reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "cuda/cuda_test.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class CudaRandomCases : public CudaTest {};

/// 5000, or what the variable LADON_TEST_RANDOM_CASES says, or a share of them.
int number_of_cases() {
  const char* const wanted = std::getenv("LADON_TEST_RANDOM_CASES");
  return repetitions(wanted == nullptr ? 5000 : std::atoi(wanted));
}

// Several threads with a Context each: the reference on the host is what takes the time.
TEST_F(CudaRandomCases, AllAreRight) {
  const int cases = number_of_cases();
  ASSERT_GT(cases, 0) << "LADON_TEST_RANDOM_CASES";
  std::atomic<int> next = 0;
  std::mutex mutex;
  std::vector<std::string> wrong;
  Ratios worst;
  const auto work = [&] {
    const Context own = cuda_context();
    Ratios ratios;
    for (int i = next++; i < cases; i = next++) {
      Random random(20261116, static_cast<std::uint64_t>(i));
      Case problem = random_case(random);
      if (i % 5 == 0) make_shard(random, problem);
      const CaseData data(problem);
      const std::string message = check_case(own, data, truth_of(data), &ratios);
      if (message.empty()) continue;
      const std::lock_guard lock(mutex);
      wrong.push_back("case " + std::to_string(i) + ": " + message);
      if (wrong.size() >= 10) next = cases;
    }
    const std::lock_guard lock(mutex);
    worst.keep_worst(ratios);
  };
  std::vector<std::thread> threads;
  const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1U, 8U);
  for (unsigned i = 0; i < count; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, std::vector<std::string>());
  std::printf("%d cases; worst errors as multiples of their bounds: %s\n", cases,
              worst.describe().c_str());
}

// f16 weights that dropout makes larger, in a block of keys that hardly raises the maximum: they
// were infinite.
TEST_F(CudaRandomCases, LargeWeightsUnderDropout) {
  Random random(20261116, 7978);
  const CaseData data(random_case(random));
  ASSERT_EQ(data.problem().dtype, DType::kF16);
  EXPECT_EQ(check_case(cuda_context(), data, truth_of(data), nullptr), "");
}

}  // namespace
}  // namespace ladon::test
