// ALiBi: the usual slopes, and layers with slopes. Their gradients are in multi_head_gradient_test.
#include <gtest/gtest.h>

#include <cstring>
#include <utility>
#include <vector>

#include "ladon/alibi.h"
#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::host_context;

using Slopes = std::vector<double>;

bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         std::memcmp(a.data(), b.data(),
                     static_cast<std::size_t>(a.num_elements()) * size_of(a.dtype())) == 0;
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

TEST(AlibiLayer, IsTheBiasThatItStandsFor) {
  const Context context(ContextOptions{.num_threads = 1});
  MultiHeadAttentionOptions options{.embed_dim = 12,
                                    .num_heads = 6,
                                    .num_kv_heads = 2,
                                    .head_dim = 4,
                                    .causal = true,
                                    .dtype = DType::kF64};
  const MultiHeadAttention plain(options, 3);
  options.alibi_slopes = alibi_slopes(6);
  const MultiHeadAttention layer(options, 3);
  EXPECT_EQ(layer.options().alibi_slopes, alibi_slopes(6));
  Tensor x(DType::kF64, {2, 9, 12});
  fill_normal(host_context(), x, 0, 1, 1);
  Tensor bias(DType::kF64, {1, 6, 9, 9});
  for (std::int64_t i = 0; i < bias.num_elements(); ++i) {
    const double distance = static_cast<double>(i / 9 % 9 - i % 9);
    bias.data_as<double>()[i] = -options.alibi_slopes[static_cast<std::size_t>(i / 81)] * distance;
  }
  const Tensor out = layer.forward(context, x.view());
  const Tensor expected = plain.forward(context, x.view(), {.bias = bias});
  for (std::int64_t i = 0; i < out.num_elements(); ++i) {
    EXPECT_NEAR(out.data_as<double>()[i], expected.data_as<double>()[i], 1e-13);
  }
  EXPECT_FALSE(same_bits(out, plain.forward(context, x.view())));
  EXPECT_TRUE(same_bits(out, layer.forward_training(context, {.query = x}).out));
  // The weights on request know of the slopes too.
  Tensor weights(DType::kF64, {2, 6, 9, 9});
  Tensor expected_weights(DType::kF64, {2, 6, 9, 9});
  layer.forward(context, x.view(), {.weights = weights});
  plain.forward(context, x.view(), {.bias = bias, .weights = expected_weights});
  for (std::int64_t i = 0; i < weights.num_elements(); ++i) {
    EXPECT_NEAR(weights.data_as<double>()[i], expected_weights.data_as<double>()[i], 1e-13);
  }
}

TEST(AlibiLayer, CopiesAndMovesCarryTheSlopes) {
  const Context context(ContextOptions{.num_threads = 1});
  MultiHeadAttention layer({.embed_dim = 8, .num_heads = 2, .alibi_slopes = {0.5, 2}}, 3);
  Tensor x(DType::kF32, {1, 5, 8});
  fill_normal(host_context(), x, 0, 1, 1);
  const Tensor out = layer.forward(context, x.view());
  const MultiHeadAttention copied(layer);
  EXPECT_TRUE(same_bits(out, copied.forward(context, x.view())));
  // What was saved before a move is used after it: the slopes have not gone stale.
  const TrainingForward forward = layer.forward_training(context, {.query = x});
  const InputGradients before = layer.backward(context, x, forward.saved);
  MultiHeadAttention moved(std::move(layer));
  EXPECT_TRUE(same_bits(out, moved.forward(context, x.view())));
  const InputGradients after = moved.backward(context, x, forward.saved);
  EXPECT_TRUE(same_bits(before.query, after.query));
}

}  // namespace
}  // namespace ladon
