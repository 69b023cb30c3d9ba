// Forced cache sizes, and what is derived from them. Run with LADON_CACHE_SIZES=16,64: L3 is
// CPUID's.

#include "cpu/cache_sizes.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string_view>

#include "cpu/drivers/forward_plan.h"
#include "cpu/kernel_table.h"

namespace ladon::cpu {
namespace {

class CacheSizesTest : public testing::Test {
 protected:
  void SetUp() override {
    const char* const forced = std::getenv("LADON_CACHE_SIZES");
    if (forced == nullptr || std::string_view(forced) != "16,64") {
      GTEST_SKIP() << "run with LADON_CACHE_SIZES=16,64";
    }
  }
  /// 32 KV heads of 128, bf16, the heads of a token next to each other.
  static AttentionParams decoding() {
    AttentionParams params;
    params.num_heads = 32;
    params.num_kv_heads = 32;
    params.head_dim = 128;
    params.value_dim = 128;
    params.k = {nullptr, DType::kBF16, 32 * 128, 128};
    params.v = params.k;
    return params;
  }
};

TEST_F(CacheSizesTest, EnvironmentOverridesCpuid) {
  EXPECT_EQ(cache_sizes().l1, 16 * 1024);
  EXPECT_EQ(cache_sizes().l2, 64 * 1024);
  EXPECT_GE(cache_sizes().l3, 512 * 1024);
}

TEST_F(CacheSizesTest, StripsFitAQuarterOfL2) {
  AttentionParams params = decoding();
  params.head_dim = 16;
  params.value_dim = 16;
  EXPECT_EQ(tiles_at_once(params, 32, 4), 4);  // 32 rows of q and of sums: 4 KiB
  EXPECT_EQ(tiles_at_once(decoding(), 32, 4), 1);
}

TEST_F(CacheSizesTest, HeadsOfADecodingTaskFitL2) {
  KernelSet kernels;
  kernels.decode_states = 64;
  SequencePlan plan;
  plan.decodes = true;
  plan.rows = 4;
  AttentionParams params = decoding();
  EXPECT_EQ(most_heads_at_once(params, plan, kernels), 16);  // streamed tokens need not fit
  plan.rows = 1;
  EXPECT_EQ(most_heads_at_once(params, plan, kernels), 32);
  const float scales = 1;
  params.kv_layout.k_scales = &scales;                      // not streamed
  EXPECT_EQ(most_heads_at_once(params, plan, kernels), 2);  // 64 tokens of a head: 32 KiB
  params.kv_layout.k_scales = nullptr;
  params.num_kv_heads = 3;
  EXPECT_EQ(most_heads_at_once(params, plan, kernels), 2);
  params.num_kv_heads = 32;
  // The tokens of a head next to each other: one head at a time.
  params.k.token_stride = 128;
  params.k.head_stride = 1 << 20;
  EXPECT_EQ(most_heads_at_once(params, plan, kernels), 1);
}

}  // namespace
}  // namespace ladon::cpu
