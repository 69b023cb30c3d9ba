// What must hold to the bit in MultiHeadAttention, and how its variants agree.

#include <gtest/gtest.h>

#include <cmath>
#include <thread>
#include <vector>

#include "ladon/head_ops.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

class MultiHeadBits : public ContextTest {
 protected:
  Tensor random_input(DType dtype, const Dims& shape) const { return normal(dtype, shape, 21); }
};

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

MultiHeadAttentionOptions rich_options(DType dtype) {
  return {.embed_dim = 24,
          .num_heads = 6,
          .num_kv_heads = 2,
          .head_dim = 10,
          .query_bias = true,
          .key_bias = true,
          .value_bias = true,
          .out_bias = true,
          .causal = true,
          .rope = RopeOptions{},
          .qk_norm = true,
          .sinks = true,
          .dtype = dtype};
}

TEST_P(MultiHeadBits, GqaWithAllHeadsIsMha) {
  const MultiHeadAttention mha = there(MultiHeadAttention::mha(24, 4, 9));
  const MultiHeadAttention gqa = there(MultiHeadAttention::gqa(24, 4, 4, 9));
  const Tensor x = random_input(DType::kF32, {2, 9, 24});
  const Tensor by_mha = mha.forward(context_, x);
  const Tensor by_gqa = gqa.forward(context_, x);
  EXPECT_TRUE(same_bits(by_mha.view(), by_gqa.view()));
  EXPECT_TRUE(mha.is_mha() && gqa.is_mha());
}

TEST_P(MultiHeadBits, GqaEqualsMhaWithRepeatedWeights) {
  MultiHeadAttentionOptions options{
      .embed_dim = 24, .num_heads = 6, .num_kv_heads = 2, .causal = true, .dtype = DType::kF64};
  const MultiHeadAttention gqa = there(MultiHeadAttention(options, 9));
  options.num_kv_heads = 6;
  MultiHeadAttention mha = there(MultiHeadAttention(options, 1));
  for (const char* name : {"q_proj.weight", "out_proj.weight"}) {
    mha.set_parameter(context_, name, gqa.parameter(name).value);
  }
  for (const char* name : {"k_proj.weight", "v_proj.weight"}) {
    // Each KV head has four rows; every one of its three query heads gets a copy of them.
    const ConstTensorView weight =
        ConstTensorView(gqa.parameter(name).value).reshape({1, 1, 2, 4 * 24});
    const Tensor repeated = repeat_kv(context_, weight, 3);
    mha.set_parameter(context_, name, ConstTensorView(repeated).reshape({24, 24}));
  }
  const Tensor x = random_input(DType::kF64, {2, 11, 24});
  const Tensor a = gqa.forward(context_, x);
  const Tensor b = mha.forward(context_, x);
  const std::vector<double> left = elements_of(a);
  const std::vector<double> right = elements_of(b);
  for (std::size_t i = 0; i < left.size(); ++i) EXPECT_NEAR(left[i], right[i], 1e-14);
}

TEST_P(MultiHeadBits, LaterPositionsDoNotTouchEarlierOnes) {
  for (const DType dtype : kFloats) {
    MultiHeadAttention layer = there(MultiHeadAttention(rich_options(dtype), 4));
    Tensor x = random_input(dtype, {2, 40, 24});
    const Tensor before = layer.forward(context_, x);
    for (const std::int64_t kept : {1, 17, 39}) {
      Tensor changed = Tensor::copy_of(context_, x);
      fill_normal(context_, changed.view().slice(1, kept, 40), 0, 20, 5);
      const Tensor after = layer.forward(context_, changed);
      EXPECT_TRUE(same_bits(before.view().slice(1, 0, kept), after.view().slice(1, 0, kept)))
          << name_of(dtype) << ' ' << kept;
    }
  }
}

TEST_P(MultiHeadBits, ASequenceAloneAndAmong64) {
  for (const DType dtype : kFloats) {
    const MultiHeadAttention layer = there(MultiHeadAttention(rich_options(dtype), 4));
    for (const std::int64_t length : {1, 7}) {
      const Tensor x = random_input(dtype, {64, length, 24});
      const Tensor all = layer.forward(context_, x);
      for (const std::int64_t i : {0, 1, 31, 63}) {
        const Tensor alone = layer.forward(context_, ConstTensorView(x.view().slice(0, i, i + 1)));
        EXPECT_TRUE(same_bits(alone.view(), all.view().slice(0, i, i + 1)))
            << name_of(dtype) << ' ' << i;
      }
    }
  }
}

TEST_P(MultiHeadBits, AnyNumberOfThreads) {
  for (const DType dtype : kFloats) {
    std::vector<Tensor> expected;
    for (const int threads : {1, 2, 3, 7}) {
      const Context context = GetParam().context(threads);
      MultiHeadAttention layer = there(MultiHeadAttention(rich_options(dtype), 4));
      const Tensor x = random_input(dtype, {3, 70, 24});
      context_.synchronize();
      TrainingForward forward = layer.forward_training(context, {.query = x});
      InputGradients gradients = layer.backward(context, x, forward.saved);
      context.synchronize();
      std::vector<Tensor> results;
      results.push_back(std::move(forward.out));
      results.push_back(std::move(gradients.query));
      for (Parameter& parameter : layer.named_parameters()) {
        results.push_back(std::move(parameter.gradient));
      }
      if (expected.empty()) {
        expected = std::move(results);
        continue;
      }
      for (std::size_t i = 0; i < results.size(); ++i) {
        EXPECT_TRUE(same_bits(expected[i].view(), results[i].view()))
            << name_of(dtype) << " result " << i << ", " << threads << " threads";
      }
    }
  }
}

TEST_P(MultiHeadBits, ConstLayersServeManyThreads) {
  const MultiHeadAttention layer = there(MultiHeadAttention(rich_options(DType::kF32), 4));
  const Tensor x = random_input(DType::kF32, {2, 50, 24});
  const Tensor expected = layer.forward(context_, x);
  std::vector<std::thread> callers;
  std::vector<int> same(4);
  for (std::size_t i = 0; i < same.size(); ++i) {
    callers.emplace_back([&, i] {
      const TrainingForward forward = layer.forward_training(context_, {.query = x});
      same[i] = same_bits(forward.out.view(), expected.view()) ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(same, std::vector<int>({1, 1, 1, 1}));
}

TEST_P(MultiHeadBits, NarrowLayersFollowTheWideOne) {
  // The same weights, rounded: results agree to the narrow dtype's own precision.
  MultiHeadAttention wide = there(MultiHeadAttention(rich_options(DType::kF64), 4));
  const Tensor x = random_input(DType::kF64, {2, 20, 24});
  const Tensor expected = wide.forward(context_, x);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    MultiHeadAttention narrow = there(MultiHeadAttention(rich_options(dtype), 1));
    for (const Parameter& parameter : wide.named_parameters()) {
      narrow.set_parameter(context_, parameter.name, parameter.value);
    }
    const Tensor out = narrow.forward(context_, Tensor::copy_of(context_, x, dtype));
    double worst = 0;
    const std::vector<double> got = elements_of(out);
    const std::vector<double> truth = elements_of(expected);
    for (std::size_t i = 0; i < got.size(); ++i) {
      worst = std::max(worst, std::abs(got[i] - truth[i]));
    }
    EXPECT_LT(worst, 20 * epsilon_of(dtype)) << name_of(dtype);
  }
}

LADON_FOR_EACH_CONTEXT(MultiHeadBits);

}  // namespace
}  // namespace ladon::test
