// Promise 5: accuracy, in every dtype, for long sums, large scores and steep softcaps.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/everywhere.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

class PromisedAccuracy : public ContextTest {};

TEST(PromisedAccuracyEverywhere, P5_AccuracyHoldsInEveryDtype) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t dim : {64, 80, 96, 128, 192, 256, 600}) {
      expect_right_everywhere({.query_len = dim == 600 ? 11 : 70,
                               .kv_len = dim == 600 ? 20 : 131,
                               .num_heads = 2,
                               .num_kv_heads = 1,
                               .head_dim = dim,
                               .value_dim = dim == 192 ? 128 : dim,
                               .dtype = dtype,
                               .kv_dtype = dtype,
                               .causal = true});
    }
  }
}

TEST(PromisedAccuracyEverywhere, P5_BackwardOverManyBlocksOfKeys) {
  // More keys than four parts of four blocks of the backward pass.
  expect_right_everywhere({.query_len = 3, .kv_len = 4700, .head_dim = 4, .value_dim = 3});
  expect_right_everywhere(
      {.query_len = 9, .kv_len = 2600, .head_dim = 2, .value_dim = 2, .causal = true});
}

TEST(PromisedAccuracyEverywhere, P5_ASplitMayHoldOneKey) {
  for (const std::int64_t right : {511, 512, 513, 1024}) {
    expect_right_everywhere({.query_len = 1,
                             .kv_len = 1500,
                             .head_dim = 4,
                             .value_dim = 3,
                             .alignment = Alignment::kTopLeft,
                             .window_right = right});
  }
}

TEST_P(PromisedAccuracy, P5_LongSumsOfEqualTermsDoNotDrift) {
  if (GetParam().is_reference()) GTEST_SKIP() << "the reference is too slow at this length";
  // Equal terms are the worst case: every rounding of a running sum goes the same way.
  constexpr std::int64_t kKeys = 200000;
  constexpr float kValue = 0.7F;
  const auto filled = [](const Dims& shape, double value) {
    Tensor tensor(DType::kF32, shape);
    fill_uniform(host_context(), tensor, value, value, 0);
    return tensor;
  };
  for (const std::int64_t query_len : {1, 70}) {
    const Tensor q = filled({1, query_len, 1, 1}, 0);
    const Tensor k = filled({1, kKeys, 1, 1}, 1);
    const Tensor v = filled({1, kKeys, 1, 1}, static_cast<double>(kValue));
    const Tensor out = host_attention(context_, q, k, v);
    for (std::int64_t i = 0; i < query_len; ++i) {
      EXPECT_NEAR(out.data_as<float>()[i], kValue, 32 * 0x1p-23F * kValue);
    }
  }
  // One key and many queries: dv sums them all.
  const Tensor q = filled({1, kKeys, 1, 1}, 0);
  const Tensor kv = filled({1, 1, 1, 1}, 1);
  const Tensor dout = filled({1, kKeys, 1, 1}, static_cast<double>(kValue));
  const Tensor out = filled({1, kKeys, 1, 1}, 1);
  const Tensor lse = filled({1, 1, kKeys}, 0);
  Tensor dv(DType::kF32, {1, 1, 1, 1});
  host_attention_backward(context_, q, kv, kv, {}, {.out = out, .lse = lse, .dout = dout},
                          {.dv = dv});
  const double expected = static_cast<double>(kValue) * kKeys;
  EXPECT_NEAR(static_cast<double>(dv.data_as<float>()[0]), expected, 32 * 0x1p-23 * expected);
  // A long head of equal numbers: the score itself is a long sum.
  const Tensor long_q = filled({1, 20, 1, 4096}, 0.7);
  Tensor long_k = filled({1, 2, 1, 4096}, 0.1);
  const Tensor pair = Tensor::from_values(DType::kF32, {1, 2, 1, 1}, {0, 1});
  fill_uniform(host_context(), long_k.view().slice(1, 1, 2), 0.1001, 0.1001, 0);
  const Tensor weights = host_attention(context_, long_q, long_k, pair);
  const double gap =
      static_cast<double>(0.7F) * 64 * (static_cast<double>(0.1001F) - static_cast<double>(0.1F));
  EXPECT_NEAR(static_cast<double>(weights.data_as<float>()[0]), 1 / (1 + std::exp(-gap)),
              32 * 0x1p-23 * 4.5);
}

TEST(PromisedAccuracyEverywhere, P5_SteepAndFlatSoftcapsHaveRightGradients) {
  for (const double softcap : {0.05, 0.3, 100.0, 1e35}) {
    for (const DType dtype : {DType::kF32, DType::kF64}) {
      expect_right_everywhere({.query_len = 21,
                               .kv_len = 30,
                               .head_dim = 8,
                               .value_dim = 5,
                               .dtype = dtype,
                               .kv_dtype = dtype,
                               .softcap = softcap});
    }
  }
}

TEST_P(PromisedAccuracy, P5_ScoresOfTenThousandAreFine) {
  // Whole numbers, so that the scores are exact and only the softmax is on trial; and the merge of
  // key splits, where there are many keys.
  for (const auto& [query_len, kv_len] :
       {std::pair<std::int64_t, std::int64_t>{1, 90}, {40, 90}, {1, 1700}}) {
    Tensor q(DType::kF32, {1, query_len, 1, 4});
    Tensor k(DType::kF32, {1, kv_len, 1, 4});
    Tensor v(DType::kF32, {1, kv_len, 1, 3});
    fill_normal(host_context(), v, 0, 1, 5);
    for (std::int64_t i = 0; i < q.num_elements(); ++i) {
      q.data_as<float>()[i] = static_cast<float>(50 + i % 3);
    }
    for (std::int64_t i = 0; i < k.num_elements(); ++i) {
      k.data_as<float>()[i] = static_cast<float>(48 + (i * 7) % 5);
    }
    const AttentionOptions options{.scale = 1};
    const Tensor out = host_attention(context_, q, k, v, options);
    const Context reference(ContextOptions{.isa = Isa::kReference});
    const Tensor truth = attention(reference, Tensor::copy_of(host_context(), q, DType::kF64),
                                   Tensor::copy_of(host_context(), k, DType::kF64),
                                   Tensor::copy_of(host_context(), v, DType::kF64), options);
    for (std::int64_t i = 0; i < out.num_elements(); ++i) {
      EXPECT_NEAR(static_cast<double>(out.data_as<float>()[i]), truth.data_as<double>()[i], 1e-6);
    }
  }
}

TEST_P(PromisedAccuracy, P5_HugeValuesInBfloat16AreFine) {
  // 133120 is a bf16 number whose square times head_dim is 1.1e12: q = k = v gives it back.
  for (const std::int64_t query_len : {1, 20}) {
    Tensor tensor(DType::kBF16, {1, query_len, 1, 64});
    fill_uniform(host_context(), tensor, 133120, 133120, 1);
    const Tensor out = host_attention(context_, tensor, tensor, tensor);
    for (std::int64_t i = 0; i < out.num_elements(); ++i) {
      ASSERT_EQ(static_cast<float>(out.data_as<bfloat16>()[i]), 133120.0F);
    }
  }
}

TEST_P(PromisedAccuracy, P5_AMaskOfTheLowestNumberIsNotAnEmptyRow) {
  // Others write -3.4e38 for "masked". A row of nothing else is an even average, not NaN.
  Tensor bias(DType::kF32, {1, 1, 1, 4});
  for (int i = 0; i < 4; ++i) bias.data_as<float>()[i] = std::numeric_limits<float>::lowest();
  for (const std::int64_t query_len : {1, 20}) {
    const Tensor q(DType::kF32, {1, query_len, 1, 2});
    const Tensor k(DType::kF32, {1, 4, 1, 2});
    const Tensor v = Tensor::from_values(DType::kF32, {1, 4, 1, 1}, {1, 2, 3, 6});
    const Tensor out = host_attention(context_, q, k, v, {.bias = bias});
    for (std::int64_t i = 0; i < query_len; ++i) EXPECT_EQ(out.data_as<float>()[i], 3);
  }
}

LADON_FOR_EACH_CONTEXT(PromisedAccuracy);

}  // namespace
}  // namespace ladon::test
