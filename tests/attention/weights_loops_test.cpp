// attention_weights(): every combination of options against loops written here from the contract,
// which share nothing with the library's reference.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attention/weights_support.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kQueries = 5;
constexpr std::int64_t kKeys = 7;
constexpr std::int64_t kHeads = 6;
constexpr std::int64_t kDim = 3;

/// A random problem and, as plain numbers, all that the loops need.
struct RandomProblem {
  explicit RandomProblem(std::int64_t kv_heads) : num_kv_heads(kv_heads) {
    q = Tensor(DType::kF32, {kBatch, kQueries, kHeads, kDim});
    k = Tensor(DType::kF32, {kBatch, kKeys, kv_heads, kDim});
    fill_normal(host_context(), q, 0, 1, 1);
    fill_normal(host_context(), k, 0, 1, 2);
  }

  std::int64_t num_kv_heads;
  Tensor q;
  Tensor k;
  Tensor mask;
  Tensor bias;
  Tensor slopes;
  Tensor sinks;
  std::vector<std::int64_t> lengths;
  AttentionOptions options;
};

double at(const ConstTensorView& view, std::int64_t b, std::int64_t h, std::int64_t i,
          std::int64_t j) {
  const std::int64_t index[] = {b, h, i, j};
  ConstTensorView rest = view;
  for (const std::int64_t n : index) rest = rest.select(0, rest.size(0) == 1 ? 0 : n);
  return values_of(rest)[0];
}

/// All stages but dropout, straight from the contract.
std::vector<double> expected_weights(const RandomProblem& problem, ScoreStage stage) {
  const AttentionOptions& options = problem.options;
  const std::vector<double> q = values_of(problem.q);
  const std::vector<double> k = values_of(problem.k);
  std::vector<double> all;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    const std::int64_t length =
        problem.lengths.empty() ? kKeys : problem.lengths[static_cast<std::size_t>(b)];
    const std::int64_t offset =
        options.alignment == Alignment::kBottomRight ? length - kQueries : 0;
    for (std::int64_t h = 0; h < kHeads; ++h) {
      const std::int64_t kv_head = h / (kHeads / problem.num_kv_heads);
      for (std::int64_t i = 0; i < kQueries; ++i) {
        const std::int64_t position = i + offset;
        std::vector<double> row(kKeys, stage == ScoreStage::kMasked ? -kInfinity : 0.0);
        double denominator = 0;
        for (std::int64_t j = 0; j < length; ++j) {
          double score = 0;
          for (std::int64_t d = 0; d < kDim; ++d) {
            score += q[static_cast<std::size_t>(((b * kQueries + i) * kHeads + h) * kDim + d)] *
                     k[static_cast<std::size_t>(
                         ((b * kKeys + j) * problem.num_kv_heads + kv_head) * kDim + d)];
          }
          double& weight = row[static_cast<std::size_t>(j)];
          score *= options.scale.value_or(1 / std::sqrt(static_cast<double>(kDim)));
          weight = score;
          if (stage == ScoreStage::kScaled) continue;
          if (options.softcap > 0) score = options.softcap * std::tanh(score / options.softcap);
          weight = score;
          if (stage == ScoreStage::kSoftcapped) continue;
          if (!options.alibi_slopes.absent()) {
            score -= values_of(problem.slopes)[static_cast<std::size_t>(h)] *
                     static_cast<double>(std::abs(j - position));
          }
          if (!options.bias.absent()) score += at(problem.bias, b, h, i, j);
          const bool hidden = (options.causal && j > position) ||
                              (options.window_left && j < position - *options.window_left) ||
                              (options.window_right && j > position + *options.window_right) ||
                              (!options.mask.absent() && at(problem.mask, b, h, i, j) == 0);
          weight = hidden ? -kInfinity : score;
          if (stage == ScoreStage::kMasked) continue;
          weight = std::exp(weight);
          denominator += weight;
        }
        if (stage >= ScoreStage::kProbability && denominator > 0) {
          if (!options.sinks.absent()) {
            denominator += std::exp(values_of(problem.sinks)[static_cast<std::size_t>(h)]);
          }
          for (double& weight : row) weight /= denominator;
        }
        all.insert(all.end(), row.begin(), row.end());
      }
    }
  }
  return all;
}

/// Options by the bits of `choice`, so that all combinations can be had.
void choose_options(RandomProblem& problem, unsigned choice) {
  AttentionOptions& options = problem.options;
  if ((choice & 1U) != 0) options.causal = true;
  if ((choice & 2U) != 0) options.alignment = Alignment::kTopLeft;
  if ((choice & 4U) != 0) {
    options.window_left = 1;
    options.window_right = 2;
  }
  if ((choice & 8U) != 0) {
    problem.lengths = {4, 0};
    if ((choice & 1U) != 0) problem.lengths = {7, 3};
    options.kv_lengths = problem.lengths;
  }
  if ((choice & 16U) != 0) {
    problem.bias = Tensor(DType::kBF16, {1, kHeads, 1, kKeys});
    fill_normal(host_context(), problem.bias, 0, 1, 3);
    options.bias = problem.bias;
    problem.mask = Tensor(DType::kBool, {kBatch, 1, kQueries, kKeys});
    Random random(4);
    for (std::int64_t n = 0; n < problem.mask.num_elements(); ++n) {
      problem.mask.data_as<bool>()[n] = random.uniform() < 0.6;
    }
    options.mask = problem.mask;
  }
  if ((choice & 32U) != 0) {
    options.softcap = 1.5;
    options.scale = -0.7;
  }
  if ((choice & 64U) != 0) {
    problem.slopes = Tensor(DType::kF32, {kHeads});
    fill_uniform(host_context(), problem.slopes, 0.1, 1, 5);
    options.alibi_slopes = problem.slopes;
  }
  if ((choice & 128U) != 0) {
    problem.sinks = Tensor(DType::kF16, {kHeads});
    fill_normal(host_context(), problem.sinks, 0, 1, 6);
    options.sinks = problem.sinks;
  }
}

class WeightsByLoops : public ContextTest {};
LADON_IN_FASTEST_PLACES(WeightsByLoops);

TEST_P(WeightsByLoops, EveryCombinationOfOptions) {
  for (unsigned choice = 0; choice < 256; ++choice) {
    RandomProblem problem(choice % 3 == 0 ? kHeads : choice % 3 == 1 ? 2 : 1);
    choose_options(problem, choice);
    for (const ScoreStage stage : kStages) {
      expect_near_all(
          weights_of(context_, problem.q, problem.k, problem.options, stage),
          expected_weights(problem, stage), 1e-11,
          "choice " + std::to_string(choice) + " stage " + std::to_string(static_cast<int>(stage)));
      if (HasFailure()) return;
    }
  }
}

TEST_P(WeightsByLoops, EveryOutputDtype) {
  RandomProblem problem(2);
  choose_options(problem, 255);
  for (const DType dtype : kFloatTypes) {
    for (const ScoreStage stage : kStages) {
      expect_near_all(weights_of(context_, problem.q, problem.k, problem.options, stage, dtype),
                      expected_weights(problem, stage), std::max(epsilon_of(dtype) / 2, 1e-11),
                      name_of(dtype));
    }
  }
}

TEST_P(WeightsByLoops, EveryInputDtype) {
  RandomProblem problem(3);
  choose_options(problem, 1 + 16 + 128);
  const Tensor narrow_k = Tensor::copy_of(host_context(), problem.k, DType::kBF16);
  problem.k = Tensor::copy_of(host_context(), narrow_k, DType::kF32);
  const Tensor narrow_q = Tensor::copy_of(host_context(), problem.q, DType::kF16);
  problem.q = Tensor::copy_of(host_context(), narrow_q, DType::kF32);
  const Tensor wide_q = Tensor::copy_of(host_context(), problem.q, DType::kF64);
  const std::vector<double> expected = expected_weights(problem, ScoreStage::kProbability);
  for (const Tensor* q : {&std::as_const(problem.q), &wide_q}) {
    expect_near_all(weights_of(context_, *q, narrow_k, problem.options, ScoreStage::kProbability),
                    expected, 1e-11, name_of(q->dtype()));
  }
}

TEST_P(WeightsByLoops, StridedInputsAndOutput) {
  RandomProblem problem(2);
  choose_options(problem, 1 + 64);
  // [batch, heads, len, dim] seen as [batch, len, heads, dim].
  const Tensor q = Tensor::copy_of(host_context(), ConstTensorView(problem.q).transpose(1, 2));
  const Tensor k = Tensor::copy_of(host_context(), ConstTensorView(problem.k).transpose(1, 2));
  const double sentinel = 77;
  Tensor memory(DType::kF32, {kKeys + 2, kQueries, kHeads + 1, 2 * kBatch});
  fill_uniform(host_context(), memory, sentinel, sentinel, 1);
  // Every dimension strided, the last one too, and gaps in three of them.
  const TensorView weights(
      memory.data_as<float>() + 1, DType::kF32, {kBatch, kHeads, kQueries, kKeys},
      {2, 2 * kBatch, 2 * kBatch * (kHeads + 1), 2 * kBatch * (kHeads + 1) * kQueries});
  host_attention_weights(context_, ConstTensorView(q).transpose(1, 2),
                         ConstTensorView(k).transpose(1, 2), problem.options, weights);
  expect_near_all(values_of(weights), expected_weights(problem, ScoreStage::kProbability), 1e-7,
                  "strided");
  const std::vector<double> all = values_of(memory);
  EXPECT_EQ(std::count(all.begin(), all.end(), sentinel),
            memory.num_elements() - weights.num_elements());
}

class WeightsAndOutput : public ContextTest {};
LADON_FOR_EACH_CONTEXT(WeightsAndOutput);

TEST_P(WeightsAndOutput, WeightsTimesValuesAreTheOutput) {
  RandomProblem problem(2);
  choose_options(problem, 1 + 16 + 32 + 64 + 128);
  problem.options.dropout = {.probability = 0.3, .seed = 5};
  Tensor v(DType::kF32, {kBatch, kKeys, 2, 4});
  fill_normal(host_context(), v, 0, 1, 8);
  const std::vector<double> weights =
      weights_of(context_, problem.q, problem.k, problem.options, ScoreStage::kDropped);
  const std::vector<double> values = values_of(v);
  const std::vector<double> out =
      values_of(host_attention(context_, problem.q, problem.k, v, problem.options));
  for (std::int64_t n = 0; n < static_cast<std::int64_t>(out.size()); ++n) {
    const std::int64_t d = n % 4;
    const std::int64_t h = n / 4 % kHeads;
    const std::int64_t i = n / 4 / kHeads % kQueries;
    const std::int64_t b = n / 4 / kHeads / kQueries;
    double sum = 0;
    for (std::int64_t j = 0; j < kKeys; ++j) {
      sum += weights[static_cast<std::size_t>(((b * kHeads + h) * kQueries + i) * kKeys + j)] *
             values[static_cast<std::size_t>(((b * kKeys + j) * 2 + h / 3) * 4 + d)];
    }
    EXPECT_NEAR(out[static_cast<std::size_t>(n)], sum, 2e-6) << n;
  }
}

}  // namespace
}  // namespace ladon::test
