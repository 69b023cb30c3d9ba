// The reference itself, against numbers worked by hand: the truth must be true.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <numbers>
#include <vector>

#include "ladon/attention.h"
#include "support/contexts.h"
#include "support/host_calls.h"

namespace ladon::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// All places must agree with the hand, not only the reference.
class ByHand : public ContextTest {
 protected:
  static Tensor tensor(const Dims& shape, std::initializer_list<double> values) {
    return Tensor::from_values(DType::kF64, shape, values);
  }
  /// One head of size 1, with q.k = the key itself where the query is 1.
  Tensor run(const AttentionOptions& options, std::initializer_list<double> queries,
             std::initializer_list<double> keys, std::initializer_list<double> values) {
    const auto shape = [](std::size_t n) { return Dims{1, static_cast<std::int64_t>(n), 1, 1}; };
    lse_ = Tensor(DType::kF64, {1, 1, static_cast<std::int64_t>(queries.size())});
    Tensor out(DType::kF64, shape(queries.size()));
    host_attention(context_, tensor(shape(queries.size()), queries),
                   tensor(shape(keys.size()), keys), tensor(shape(values.size()), values), options,
                   out, lse_);
    return out;
  }
  double lse(std::int64_t i) const { return lse_.data_as<double>()[i]; }

  Tensor lse_;
};

void expect_values(const Tensor& tensor, const std::vector<double>& expected) {
  ASSERT_EQ(tensor.num_elements(), static_cast<std::int64_t>(expected.size()));
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_NEAR(tensor.data_as<double>()[i], expected[i], 1e-14) << "element " << i;
  }
}

TEST_P(ByHand, WeightsOfOneAndThree) {
  // Scores 0 and ln 3: weights 1/4 and 3/4.
  const Tensor out = run({}, {1}, {0, std::log(3)}, {8, 4});
  expect_values(out, {0.25 * 8 + 0.75 * 4});
  EXPECT_NEAR(lse(0), std::log(4), 1e-15);
}

TEST_P(ByHand, DefaultScaleIsOneOverTheRootOfHeadDim) {
  const Tensor q = tensor({1, 1, 1, 4}, {1, 1, 1, 1});
  const Tensor k = tensor({1, 2, 1, 4}, {0, 0, 0, 0, 2 * std::log(3), 0, 0, 0});
  const Tensor v = tensor({1, 2, 1, 1}, {0, 1});
  expect_values(host_attention(context_, q, k, v), {0.75});  // 2 ln 3 / sqrt(4)
  expect_values(host_attention(context_, q, k, v, {.scale = 0}), {0.5});
  expect_values(host_attention(context_, q, k, v, {.scale = -0.5}), {0.25});
}

TEST_P(ByHand, CausalCorners) {
  // Equal scores, so each row is the mean of what it sees.
  const AttentionOptions bottom_right{.causal = true};
  expect_values(run(bottom_right, {1, 1}, {0, 0, 0}, {3, 6, 9}), {4.5, 6});
  const AttentionOptions top_left{.causal = true, .alignment = Alignment::kTopLeft};
  expect_values(run(top_left, {1, 1}, {0, 0, 0}, {3, 6, 9}), {3, 4.5});
  // More queries than keys: bottom-right leaves the first rows with nothing.
  expect_values(run(bottom_right, {1, 1, 1}, {0, 0}, {2, 4}), {0, 2, 3});
  EXPECT_EQ(lse(0), -kInfinity);
  EXPECT_EQ(lse(1), 0);
}

TEST_P(ByHand, WindowIsInclusive) {
  const AttentionOptions options{
      .alignment = Alignment::kTopLeft, .window_left = 1, .window_right = 0};
  expect_values(run(options, {1, 1, 1}, {0, 0, 0}, {3, 6, 9}), {3, 4.5, 7.5});
  const AttentionOptions right{
      .alignment = Alignment::kTopLeft, .window_left = 0, .window_right = 1};
  expect_values(run(right, {1, 1, 1}, {0, 0, 0}, {3, 6, 9}), {4.5, 7.5, 9});
}

TEST_P(ByHand, SoftcapComesBeforeBias) {
  // 2 tanh(s / 2) with s so large that tanh is 1: the score is 2; the bias then adds ln 3 - 2.
  const Tensor bias = tensor({1, 1, 1, 2}, {0, std::log(3) - 2});
  expect_values(run({.bias = bias, .softcap = 2}, {1}, {0, 1000}, {0, 1}), {0.75});
}

TEST_P(ByHand, AlibiFallsWithDistanceOnBothSides) {
  const Tensor slopes = tensor({1}, {std::log(2)});
  // Query 0 of a top-left problem with 3 keys: weights 1, 1/2, 1/4.
  const AttentionOptions options{.alignment = Alignment::kTopLeft, .alibi_slopes = slopes};
  expect_values(run(options, {1}, {0, 0, 0}, {7, 0, 0}), {4});
  // Bottom-right it stands at key 2: weights 1/4, 1/2, 1.
  expect_values(run({.alibi_slopes = slopes}, {1}, {0, 0, 0}, {7, 0, 0}), {1});
}

TEST_P(ByHand, ASinkTakesItsShare) {
  const Tensor sinks = tensor({1}, {std::log(2)});
  // Denominator 1 + 1 + 2.
  expect_values(run({.sinks = sinks}, {1}, {0, 0}, {4, 8}), {3});
  EXPECT_NEAR(lse(0), std::log(4), 1e-15);
}

TEST_P(ByHand, MaskAndInfiniteBiasHide) {
  Tensor mask(DType::kBool, {1, 1, 1, 3});
  mask.data_as<bool>()[0] = true;
  mask.data_as<bool>()[2] = true;
  expect_values(run({.mask = mask}, {1}, {0, 0, 0}, {3, 100, 9}), {6});
  const Tensor bias = tensor({1, 1, 1, 3}, {0, -kInfinity, 0});
  expect_values(run({.bias = bias}, {1}, {0, 0, 0}, {3, 100, 9}), {6});
}

TEST_P(ByHand, QueryHeadsShareTheirKvHead) {
  // Four heads over two: heads 0 and 1 read KV head 0, heads 2 and 3 read KV head 1.
  const Tensor q = tensor({1, 1, 4, 1}, {1, 1, 1, 1});
  const Tensor k = tensor({1, 1, 2, 1}, {0, 0});
  const Tensor v = tensor({1, 1, 2, 1}, {5, 7});
  expect_values(host_attention(context_, q, k, v), {5, 5, 7, 7});
}

TEST_P(ByHand, GradientsOfTwoKeys) {
  // Weights 1/4 and 3/4, values 8 and 4, out 5, dout 1:
  //   dv = weights; dS_j = p_j (v_j - out) = 3/4 and -3/4; dq = sum dS_j k_j; dk_j = dS_j q.
  const double ln3 = std::log(3);
  const Tensor q = tensor({1, 1, 1, 1}, {1});
  const Tensor k = tensor({1, 2, 1, 1}, {0, ln3});
  const Tensor v = tensor({1, 2, 1, 1}, {8, 4});
  const Tensor bias = tensor({1, 1, 1, 2}, {0, 0});
  Tensor out(DType::kF64, {1, 1, 1, 1});
  Tensor lse(DType::kF64, {1, 1, 1});
  host_attention(context_, q, k, v, {.bias = bias}, out, lse);
  const Tensor dout = tensor({1, 1, 1, 1}, {1});
  Tensor dq(DType::kF64, {1, 1, 1, 1});
  Tensor dk(DType::kF64, {1, 2, 1, 1});
  Tensor dv(DType::kF64, {1, 2, 1, 1});
  Tensor dbias(DType::kF64, {1, 1, 1, 2});
  host_attention_backward(context_, q, k, v, {.bias = bias}, {.out = out, .lse = lse, .dout = dout},
                          {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias});
  expect_values(dv, {0.25, 0.75});
  expect_values(dq, {-0.75 * ln3});
  expect_values(dk, {0.75, -0.75});
  expect_values(dbias, {0.75, -0.75});
}

TEST_P(ByHand, GradientOfASink) {
  // Weights 1/4, 1/4 and the sink's 1/2; values 4 and 8, out 3, dout 1: dsink = -1/2 * 3.
  const Tensor q = tensor({1, 1, 1, 1}, {1});
  const Tensor k = tensor({1, 2, 1, 1}, {0, 0});
  const Tensor v = tensor({1, 2, 1, 1}, {4, 8});
  const Tensor sinks = tensor({1}, {std::log(2)});
  Tensor out(DType::kF64, {1, 1, 1, 1});
  Tensor lse(DType::kF64, {1, 1, 1});
  host_attention(context_, q, k, v, {.sinks = sinks}, out, lse);
  const Tensor dout = tensor({1, 1, 1, 1}, {1});
  Tensor dsinks(DType::kF64, {1});
  host_attention_backward(context_, q, k, v, {.sinks = sinks},
                          {.out = out, .lse = lse, .dout = dout}, {.dsinks = dsinks});
  expect_values(dsinks, {-1.5});
}

LADON_FOR_EACH_CONTEXT(ByHand);

}  // namespace
}  // namespace ladon::test
