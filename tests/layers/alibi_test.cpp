// ALiBi: the usual slopes, and layers with slopes. Their gradients are in multi_head_gradient_test.
#include <gtest/gtest.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "ladon/alibi.h"
#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"

namespace ladon {
namespace {

using test::elements_of;
using Slopes = std::vector<double>;

class AlibiLayer : public test::ContextTest {};
LADON_FOR_EACH_CONTEXT(AlibiLayer);

void expect_near(const Tensor& a, const Tensor& b, double bound) {
  const std::vector<double> left = elements_of(a);
  const std::vector<double> right = elements_of(b);
  ASSERT_EQ(left.size(), right.size());
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_NEAR(left[i], right[i], bound);
}

TEST(AlibiSlopes, OfPowersOfTwoAreAGeometricSeries) {
  EXPECT_EQ(alibi_slopes(1), (Slopes{0x1p-8}));
  EXPECT_EQ(alibi_slopes(2), (Slopes{0x1p-4, 0x1p-8}));
  EXPECT_EQ(alibi_slopes(8), (Slopes{0.5, 0.25, 0.125, 0x1p-4, 0x1p-5, 0x1p-6, 0x1p-7, 0x1p-8}));
  const Slopes sixteen = alibi_slopes(16);
  ASSERT_EQ(sixteen.size(), 16U);
  EXPECT_NEAR(sixteen[0], 0.70710678118654752, 1e-15);
  EXPECT_EQ(sixteen[15], 0x1p-8);
}

TEST(AlibiSlopes, OfOtherNumbersTakeEverySecondOfTheNextPower) {
  EXPECT_EQ(alibi_slopes(3), (Slopes{0x1p-4, 0x1p-8, 0x1p-2}));
  // 4 heads: 2^-2, 2^-4, 2^-6, 2^-8; 8 heads: 2^-1, 2^-2, 2^-3, ...
  EXPECT_EQ(alibi_slopes(6), (Slopes{0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1, 0x1p-3}));
  EXPECT_EQ(alibi_slopes(7), (Slopes{0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1, 0x1p-3, 0x1p-5}));
  const Slopes many = alibi_slopes(112);  // Bloom's own number of heads
  ASSERT_EQ(many.size(), 112U);
  for (std::size_t i = 0; i < 64; ++i) EXPECT_EQ(many[i], alibi_slopes(64)[i]);
  for (std::size_t i = 64; i < 112; ++i) EXPECT_EQ(many[i], alibi_slopes(128)[2 * (i - 64)]);
}

TEST_P(AlibiLayer, IsTheBiasThatItStandsFor) {
  MultiHeadAttentionOptions options{.embed_dim = 12,
                                    .num_heads = 6,
                                    .num_kv_heads = 2,
                                    .head_dim = 4,
                                    .causal = true,
                                    .dtype = DType::kF64};
  const MultiHeadAttention plain = there(MultiHeadAttention(options, 3));
  options.alibi_slopes = alibi_slopes(6);
  const MultiHeadAttention layer = there(MultiHeadAttention(options, 3));
  EXPECT_EQ(layer.options().alibi_slopes, alibi_slopes(6));
  const Tensor x = normal(DType::kF64, {2, 9, 12}, 1);
  std::vector<double> biases;
  for (int i = 0; i < 6 * 9 * 9; ++i) {
    const double distance = i / 9 % 9 - i % 9;
    biases.push_back(-options.alibi_slopes[static_cast<std::size_t>(i / 81)] * distance);
  }
  const Tensor bias = there(Tensor::from_values(DType::kF64, {1, 6, 9, 9}, biases));
  const Tensor out = layer.forward(context_, x.view());
  const Tensor expected = plain.forward(context_, x.view(), {.bias = bias});
  expect_near(out, expected, 1e-13);
  EXPECT_FALSE(same_bits(out, plain.forward(context_, x.view())));
  EXPECT_TRUE(same_bits(out, layer.forward_training(context_, {.query = x}).out));
  // The weights on request know of the slopes too.
  Tensor weights(context_, DType::kF64, {2, 6, 9, 9});
  Tensor expected_weights(context_, DType::kF64, {2, 6, 9, 9});
  layer.forward(context_, x.view(), {.weights = weights});
  plain.forward(context_, x.view(), {.bias = bias, .weights = expected_weights});
  expect_near(weights, expected_weights, 1e-13);
}

TEST_P(AlibiLayer, CopiesAndMovesCarryTheSlopes) {
  MultiHeadAttention layer =
      there(MultiHeadAttention({.embed_dim = 8, .num_heads = 2, .alibi_slopes = {0.5, 2}}, 3));
  const Tensor x = normal(DType::kF32, {1, 5, 8}, 1);
  const Tensor out = layer.forward(context_, x.view());
  const MultiHeadAttention copied(layer);
  EXPECT_TRUE(same_bits(out, copied.forward(context_, x.view())));
  // What was saved before a move is used after it: the slopes have not gone stale.
  const TrainingForward forward = layer.forward_training(context_, {.query = x});
  const InputGradients before = layer.backward(context_, x, forward.saved);
  MultiHeadAttention moved(std::move(layer));
  EXPECT_TRUE(same_bits(out, moved.forward(context_, x.view())));
  const InputGradients after = moved.backward(context_, x, forward.saved);
  EXPECT_TRUE(same_bits(before.query, after.query));
}

}  // namespace
}  // namespace ladon
