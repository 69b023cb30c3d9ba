// attention_weights(): every stage against numbers worked by hand; and dropout.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "attention/weights_support.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

// ---- worked by hand
// ------------------------------------------------------------------------------

/// One head of dimension 1, so that a score is the product of two numbers.
struct Tiny {
  Tensor q = Tensor::from_values(DType::kF64, {1, 2, 1, 1}, {1, 2});
  Tensor k = Tensor::from_values(DType::kF64, {1, 3, 1, 1}, {0, std::log(2.0), std::log(3.0)});
};

class WeightsByHand : public ContextTest {};
LADON_IN_FASTEST_PLACES(WeightsByHand);

TEST_P(WeightsByHand, EveryStage) {
  const Tiny tiny;
  const double log2 = std::log(2.0);
  const double log3 = std::log(3.0);
  const std::vector<double> scores{0, log2, log3, 0, 2 * log2, 2 * log3};
  const std::vector<double> probabilities{1.0 / 6, 2.0 / 6, 3.0 / 6, 1.0 / 14, 4.0 / 14, 9.0 / 14};
  for (const ScoreStage stage : kStages) {
    expect_near_all(weights_of(context_, tiny.q, tiny.k, {}, stage),
                    stage >= ScoreStage::kProbability ? probabilities : scores, 1e-14,
                    "stage " + std::to_string(static_cast<int>(stage)));
  }
}

TEST_P(WeightsByHand, Causal) {
  const Tiny tiny;
  AttentionOptions options{.causal = true};
  // Two queries at the end of three keys: they see two and three of them.
  expect_near_all(weights_of(context_, tiny.q, tiny.k, options, ScoreStage::kProbability),
                  {1.0 / 3, 2.0 / 3, 0, 1.0 / 14, 4.0 / 14, 9.0 / 14}, 1e-14, "bottom right");
  options.alignment = Alignment::kTopLeft;
  expect_near_all(weights_of(context_, tiny.q, tiny.k, options, ScoreStage::kProbability),
                  {1, 0, 0, 1.0 / 5, 4.0 / 5, 0}, 1e-14, "top left");
  expect_near_all(weights_of(context_, tiny.q, tiny.k, options, ScoreStage::kMasked),
                  {0, -kInfinity, -kInfinity, 0, 2 * std::log(2.0), -kInfinity}, 1e-14, "masked");
}

TEST_P(WeightsByHand, SinkTakesItsShare) {
  const Tiny tiny;
  const Tensor sinks = Tensor::from_values(DType::kF32, {1}, {0});  // adds 1 to the denominator
  const AttentionOptions options{.sinks = sinks};
  expect_near_all(weights_of(context_, tiny.q, tiny.k, options, ScoreStage::kProbability),
                  {1.0 / 7, 2.0 / 7, 3.0 / 7, 1.0 / 15, 4.0 / 15, 9.0 / 15}, 1e-14, "sink");
}

TEST_P(WeightsByHand, ALargeSinkTakesAlmostEverything) {
  const Tiny tiny;
  for (const double sink : {500.0, 1000.0, 1e5}) {
    const Tensor sinks = Tensor::from_values(DType::kF64, {1}, {sink});
    const double share = std::exp(-sink);
    expect_near_all(
        weights_of(context_, tiny.q, tiny.k, {.sinks = sinks}, ScoreStage::kProbability),
        {share, 2 * share, 3 * share, share, 4 * share, 9 * share}, 1e-9, std::to_string(sink));
  }
}

TEST_P(WeightsByHand, SoftcapAlibiBiasAndMaskInTheirOrder) {
  const Tensor q = Tensor::from_values(DType::kF64, {1, 1, 1, 1}, {3});
  const Tensor k = Tensor::from_values(DType::kF64, {1, 3, 1, 1}, {1, 1, 2});
  const Tensor slopes = Tensor::from_values(DType::kF64, {1}, {0.25});
  const Tensor bias = Tensor::from_values(DType::kF64, {1, 1, 1, 3}, {10, 20, 30});
  const Tensor mask = Tensor::from_values(DType::kBool, {1, 1, 1, 3}, {1, 0, 1});
  const AttentionOptions options{
      .scale = 0.5, .mask = mask, .bias = bias, .softcap = 2, .alibi_slopes = slopes};
  expect_near_all(weights_of(context_, q, k, options, ScoreStage::kScaled), {1.5, 1.5, 3}, 1e-15,
                  "scaled");
  const double low = 2 * std::tanh(0.75);
  const double high = 2 * std::tanh(1.5);
  expect_near_all(weights_of(context_, q, k, options, ScoreStage::kSoftcapped), {low, low, high},
                  1e-15, "softcapped");
  // The query stands at the last key: distances 2, 1 and 0.
  const double first = low - 0.5 + 10;
  const double last = high + 30;
  expect_near_all(weights_of(context_, q, k, options, ScoreStage::kMasked),
                  {first, -kInfinity, last}, 1e-15, "masked");
  const double share = 1 / (1 + std::exp(last - first));
  expect_near_all(weights_of(context_, q, k, options, ScoreStage::kProbability),
                  {share, 0, 1 - share}, 1e-12, "probability");
}

TEST_P(WeightsByHand, RowsThatSeeNothingAreZero) {
  const Tiny tiny;
  const Tensor mask = Tensor::from_values(DType::kBool, {1, 1, 2, 1}, {0, 1});
  const Tensor bias = Tensor::from_values(DType::kF32, {1, 1, 2, 1}, {-kInfinity, 0});
  const Tensor sinks = Tensor::from_values(DType::kF32, {1}, {5});
  const std::int64_t no_keys[] = {0};
  const std::vector<double> expected{0, 0, 0, 1.0 / 14, 4.0 / 14, 9.0 / 14};
  for (const ScoreStage stage : {ScoreStage::kProbability, ScoreStage::kDropped}) {
    expect_near_all(weights_of(context_, tiny.q, tiny.k, {.mask = mask}, stage), expected, 1e-14,
                    "mask");
    expect_near_all(weights_of(context_, tiny.q, tiny.k, {.bias = bias}, stage), expected, 1e-14,
                    "bias");
    expect_near_all(
        weights_of(context_, tiny.q, tiny.k, {.kv_lengths = no_keys, .sinks = sinks}, stage),
        std::vector<double>(6), 0, "no keys");
  }
  expect_near_all(
      weights_of(context_, tiny.q, tiny.k, {.kv_lengths = no_keys}, ScoreStage::kMasked),
      std::vector<double>(6, -kInfinity), 0, "no keys, masked");
  expect_near_all(
      weights_of(context_, tiny.q, tiny.k, {.kv_lengths = no_keys}, ScoreStage::kScaled),
      std::vector<double>(6), 0, "no keys, scaled");
}

TEST_P(WeightsByHand, GarbageWhereNothingLooks) {
  Tiny tiny;
  const std::int64_t lengths[] = {2};
  tiny.k.data_as<double>()[2] = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> expected{1.0 / 3, 2.0 / 3, 0, 1.0 / 5, 4.0 / 5, 0};
  expect_near_all(
      weights_of(context_, tiny.q, tiny.k, {.kv_lengths = lengths}, ScoreStage::kProbability),
      expected, 1e-14, "padding");
  const Tensor mask = Tensor::from_values(DType::kBool, {1, 1, 1, 3}, {1, 1, 0});
  expect_near_all(weights_of(context_, tiny.q, tiny.k, {.mask = mask}, ScoreStage::kProbability),
                  expected, 1e-14, "mask");
}

// ---- dropout
// -------------------------------------------------------------------------------------

struct DropoutProblem {
  DropoutProblem() {
    fill_normal(host_context(), q, 0, 1, 1);
    fill_normal(host_context(), k, 0, 1, 2);
  }
  std::vector<double> weights(const Context& context, const DropoutOptions& dropout,
                              ScoreStage stage) const {
    return weights_of(context, q, k, {.dropout = dropout}, stage);
  }

  Tensor q{DType::kF32, {3, 40, 4, 5}};
  Tensor k{DType::kF32, {3, 50, 2, 5}};
};

class WeightsDropout : public ContextTest {};
LADON_IN_FASTEST_PLACES(WeightsDropout);

TEST_P(WeightsDropout, DropsAboutAsManyAsAskedForAndScalesTheRest) {
  const DropoutProblem problem;
  const std::vector<double> plain = problem.weights(context_, {}, ScoreStage::kProbability);
  EXPECT_EQ(problem.weights(context_, {}, ScoreStage::kDropped), plain);
  for (const double probability : {0.1, 0.5, 0.9}) {
    const DropoutOptions dropout{.probability = probability, .seed = 7};
    EXPECT_EQ(problem.weights(context_, dropout, ScoreStage::kProbability), plain);
    const std::vector<double> dropped = problem.weights(context_, dropout, ScoreStage::kDropped);
    double count = 0;
    for (std::size_t i = 0; i < plain.size(); ++i) {
      if (dropped[i] == 0) {
        ++count;
      } else {
        EXPECT_NEAR(dropped[i] / plain[i], 1 / (1 - probability), 1e-12);
      }
    }
    const double total = static_cast<double>(plain.size());
    const double deviation = std::sqrt(probability * (1 - probability) / total);
    EXPECT_NEAR(count / total, probability, 5 * deviation);
  }
}

TEST_P(WeightsDropout, PatternIsOfSeedAndSequence) {
  const DropoutProblem problem;
  const DropoutOptions dropout{.probability = 0.5, .seed = 7};
  const std::vector<double> first = problem.weights(context_, dropout, ScoreStage::kDropped);
  EXPECT_EQ(problem.weights(context_, dropout, ScoreStage::kDropped), first);
  EXPECT_NE(problem.weights(context_, {.probability = 0.5, .seed = 8}, ScoreStage::kDropped),
            first);
  EXPECT_NE(problem.weights(context_, {.probability = 0.5, .seed = 7, .first_sequence = 1},
                            ScoreStage::kDropped),
            first);
  // The last sequence alone, under its number.
  const std::vector<double> alone = weights_of(
      context_, ConstTensorView(problem.q).slice(0, 2, 3),
      ConstTensorView(problem.k).slice(0, 2, 3),
      {.dropout = {.probability = 0.5, .seed = 7, .first_sequence = 2}}, ScoreStage::kDropped);
  const auto size = static_cast<std::ptrdiff_t>(alone.size());
  EXPECT_EQ(alone, std::vector<double>(first.end() - size, first.end()));
}

TEST_P(WeightsByHand, EmptyIsLegal) {
  for (const Dims& sizes : {Dims{0, 3, 2}, Dims{2, 0, 3}, Dims{2, 3, 0}}) {
    const Tensor q(DType::kF32, {sizes[0], sizes[1], 2, 4});
    const Tensor k(DType::kF32, {sizes[0], sizes[2], 1, 4});
    EXPECT_TRUE(weights_of(context_, q, k, {.causal = true}, ScoreStage::kDropped).empty());
  }
}

}  // namespace
}  // namespace ladon::test
