// The scratch memory of the CPU's kernels: a layout cannot take more than a worker's part of it.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <vector>

#include "cpu/dispatch.h"
#include "cpu/kernel_table.h"
#include "support/isas.h"

namespace ladon::cpu {
namespace {

class KernelScratch : public test::IsaTest {
 protected:
  void SetUp() override {
    if (kernels_ == nullptr) GTEST_SKIP() << "skipped: the reference has no kernels";
  }
  const KernelTable* kernels_ = kernels_for(GetParam());
};

/// One row of two groups of three heads, and a block of memory for its kernel.
struct HeadSum {
  static constexpr std::int64_t kDim = 21;
  std::vector<double> x = std::vector<double>(6 * kDim, 1.0);
  std::vector<double> y = std::vector<double>(2 * kDim, 0.0);
  alignas(kScratchAlignment) std::array<std::byte, 1024> memory{};

  void run(const KernelSet& kernels, std::size_t bytes) {
    kernels.sum_heads(params(), {0, 1}, {memory.data(), bytes});
  }
  HeadSumParams params() {
    return {.rows = 1,
            .groups = 2,
            .group = 3,
            .dim = kDim,
            .x = {.data = x.data(), .dtype = DType::kF64, .stride = 6 * kDim},
            .x_head_stride = kDim,
            .y = {.data = y.data(), .dtype = DType::kF64, .stride = 2 * kDim},
            .y_head_stride = kDim};
  }
};

TEST_P(KernelScratch, AKernelKeepsToWhatItCounted) {
  HeadSum sum;
  const std::size_t bytes = kernels_->f64.sum_heads_scratch(sum.params());
  ASSERT_LT(bytes, sum.memory.size());
  sum.memory.fill(std::byte{0x5a});
  sum.run(kernels_->f64, bytes);
  EXPECT_EQ(sum.y, std::vector<double>(2 * HeadSum::kDim, 3.0));
  for (std::size_t i = bytes; i < sum.memory.size(); ++i) {
    ASSERT_EQ(sum.memory.at(i), std::byte{0x5a}) << i;
  }
}

TEST_P(KernelScratch, ALayoutWithTooLittleMemoryEndsTheProgram) {
  if (kernels_ == nullptr) GTEST_SKIP() << "skipped: the reference has no kernels";
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HeadSum sum;
  const std::size_t bytes = kernels_->f64.sum_heads_scratch(sum.params());
  EXPECT_DEATH(sum.run(kernels_->f64, bytes - kScratchAlignment), "");
}

LADON_FOR_EACH_ISA(KernelScratch);

}  // namespace
}  // namespace ladon::cpu
