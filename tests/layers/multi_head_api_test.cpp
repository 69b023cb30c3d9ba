// MultiHeadAttention as it is made: options and their defaults, parameters, initial weights.
// multi_head_state_test.cpp has what changes them, multi_head_calls_test.cpp the forward calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ladon/multi_head_attention.h"
#include "support/contexts.h"

namespace ladon {
namespace {

using test::elements_of;

constexpr std::uint64_t kSeed = 0x123456789ABCDEF0U;

std::vector<std::vector<double>> weights_of(const AttentionLayer& layer) {
  std::vector<std::vector<double>> all;
  for (const Parameter& parameter : layer.named_parameters()) {
    all.push_back(elements_of(parameter.value));
    EXPECT_TRUE(parameter.gradient.view().absent()) << parameter.name;
  }
  return all;
}

/// Layers are made on the host; the tests of their weights move them to the place.
class MultiHeadApi : public test::ContextTest {
 protected:
  MultiHeadAttention make(const MultiHeadAttentionOptions& options, std::uint64_t seed = 0) const {
    return there(MultiHeadAttention(options, seed));
  }
};
LADON_FOR_EACH_CONTEXT(MultiHeadApi);

// ---- options ---------------------------------------------------------------------------------

TEST(MultiHeadOptions, DefaultsAreFilledIn) {
  const MultiHeadAttention layer({.embed_dim = 48, .num_heads = 6});
  EXPECT_EQ(layer.options().num_kv_heads, 6);
  EXPECT_EQ(layer.options().head_dim, 8);
  EXPECT_EQ(layer.options().key_dim, 48);
  EXPECT_EQ(layer.options().value_input_dim, 48);
  EXPECT_EQ(layer.options().dtype, DType::kF32);
  EXPECT_EQ(layer.options().qk_norm_epsilon, 1e-6);
  EXPECT_FALSE(layer.options().scale.has_value());
  EXPECT_FALSE(layer.options().rope.has_value());
  EXPECT_FALSE(layer.options().causal);
  EXPECT_TRUE(layer.is_training());

  const MultiHeadAttention cross({.embed_dim = 48, .num_heads = 6, .key_dim = 10});
  EXPECT_EQ(cross.options().value_input_dim, 10);  // the key's, where it is not given
}

TEST_P(MultiHeadApi, ZerosDrawNothing) {
  const MultiHeadAttention layer = there(MultiHeadAttention::zeros(
      {.embed_dim = 8, .num_heads = 2, .out_bias = true, .qk_norm = true, .sinks = true}));
  EXPECT_EQ(layer.named_parameters().size(), 8U);
  EXPECT_TRUE(layer.is_training());
  for (const Parameter& parameter : layer.named_parameters()) {
    const double expected = parameter.name.find("norm") == std::string::npos ? 0 : 1;
    for (const double value : elements_of(parameter.value)) EXPECT_EQ(value, expected);
  }
}

TEST(MultiHeadOptions, WhatIsGivenIsKept) {
  const MultiHeadAttention layer({.embed_dim = 10,
                                  .num_heads = 6,
                                  .num_kv_heads = 2,
                                  .head_dim = 4,
                                  .key_dim = 7,
                                  .value_input_dim = 3,
                                  .causal = true,
                                  .rope = RopeOptions{.rotary_dim = 2, .base = 500},
                                  .scale = 0.25,
                                  .softcap = 30,
                                  .window_left = 5,
                                  .window_right = 0,
                                  .dropout = 0.1,
                                  .dtype = DType::kF16});
  EXPECT_EQ(layer.embed_dim(), 10);
  EXPECT_EQ(layer.num_heads(), 6);
  EXPECT_EQ(layer.num_kv_heads(), 2);
  EXPECT_EQ(layer.head_dim(), 4);
  EXPECT_EQ(layer.value_dim(), 4);
  EXPECT_EQ(layer.key_dim(), 7);
  EXPECT_EQ(layer.value_input_dim(), 3);
  EXPECT_EQ(layer.dtype(), DType::kF16);
  EXPECT_EQ(layer.type_name(), "MultiHeadAttention");
  const MultiHeadAttentionOptions& options = layer.options();
  EXPECT_TRUE(options.causal);
  EXPECT_EQ(options.rope->rotary_dim, 2);
  EXPECT_EQ(options.rope->base, 500);
  EXPECT_EQ(options.scale, 0.25);
  EXPECT_EQ(options.softcap, 30);
  EXPECT_EQ(options.window_left, 5);
  EXPECT_EQ(options.window_right, 0);
  EXPECT_EQ(options.dropout, 0.1);
}

TEST_P(MultiHeadApi, NamedConstructors) {
  const auto kinds = [](const MultiHeadAttention& layer) {
    return std::array{layer.is_mha(), layer.is_gqa(), layer.is_mqa()};
  };
  const auto mha = there(MultiHeadAttention::mha(32, 4, 9));
  const auto gqa = there(MultiHeadAttention::gqa(32, 4, 2, 9));
  const auto mqa = there(MultiHeadAttention::mqa(32, 4, 9));
  EXPECT_EQ(kinds(mha), (std::array{true, false, false}));
  EXPECT_EQ(kinds(gqa), (std::array{false, true, false}));
  EXPECT_EQ(kinds(mqa), (std::array{false, false, true}));
  EXPECT_EQ(kinds(MultiHeadAttention::mha(32, 1)), (std::array{true, false, true}));
  EXPECT_EQ(mha.num_kv_heads(), 4);
  EXPECT_EQ(gqa.num_kv_heads(), 2);
  EXPECT_EQ(mqa.num_kv_heads(), 1);
  EXPECT_EQ(mqa.head_dim(), 8);
  const auto same = make({.embed_dim = 32, .num_heads = 4, .num_kv_heads = 2}, 9);
  EXPECT_EQ(weights_of(gqa), weights_of(same));
  EXPECT_EQ(weights_of(there(MultiHeadAttention::gqa(32, 4, 4, 9))), weights_of(mha));
}

// ---- parameters ------------------------------------------------------------------------------

using NamedShapes = std::vector<std::pair<std::string, std::string>>;

NamedShapes named_shapes(const AttentionLayer& layer) {
  NamedShapes shapes;
  for (const Parameter& parameter : layer.named_parameters()) {
    EXPECT_EQ(parameter.value.dtype(), layer.dtype()) << parameter.name;
    shapes.emplace_back(parameter.name, parameter.value.shape().to_string());
  }
  return shapes;
}

TEST_P(MultiHeadApi, FourWeightsWithoutSwitches) {
  const MultiHeadAttention layer =
      make({.embed_dim = 64, .num_heads = 4, .num_kv_heads = 1, .head_dim = 16});
  EXPECT_EQ(named_shapes(layer), (NamedShapes{{"q_proj.weight", "[64, 64]"},
                                              {"k_proj.weight", "[16, 64]"},
                                              {"v_proj.weight", "[16, 64]"},
                                              {"out_proj.weight", "[64, 64]"}}));
  EXPECT_EQ(layer.parameter_count(), 4096 + 1024 + 1024 + 4096);
}

TEST_P(MultiHeadApi, EverySwitchAddsItsOwnParameters) {
  using Switch = void (*)(MultiHeadAttentionOptions&);
  const MultiHeadAttentionOptions plain{.embed_dim = 10,
                                        .num_heads = 6,
                                        .num_kv_heads = 2,
                                        .head_dim = 4,
                                        .key_dim = 7,
                                        .value_input_dim = 3};
  // In the order of the layer's parameters; the index is the switch's bit below.
  const std::vector<std::pair<int, std::pair<std::string, std::string>>> parameters = {
      {-1, {"q_proj.weight", "[24, 10]"}},
      {0, {"q_proj.bias", "[24]"}},
      {-1, {"k_proj.weight", "[8, 7]"}},
      {1, {"k_proj.bias", "[8]"}},
      {-1, {"v_proj.weight", "[8, 3]"}},
      {2, {"v_proj.bias", "[8]"}},
      {-1, {"out_proj.weight", "[10, 24]"}},
      {3, {"out_proj.bias", "[10]"}},
      {4, {"q_norm.weight", "[4]"}},
      {4, {"k_norm.weight", "[4]"}},
      {5, {"sinks", "[6]"}}};
  const Switch switches[] = {[](MultiHeadAttentionOptions& options) { options.query_bias = true; },
                             [](MultiHeadAttentionOptions& options) { options.key_bias = true; },
                             [](MultiHeadAttentionOptions& options) { options.value_bias = true; },
                             [](MultiHeadAttentionOptions& options) { options.out_bias = true; },
                             [](MultiHeadAttentionOptions& options) { options.qk_norm = true; },
                             [](MultiHeadAttentionOptions& options) { options.sinks = true; }};
  for (unsigned bits = 0; bits < 64; ++bits) {
    MultiHeadAttentionOptions options = plain;
    for (unsigned bit = 0; bit < 6; ++bit) {
      if ((bits >> bit & 1U) != 0) switches[bit](options);
    }
    NamedShapes expected;
    for (const auto& [bit, parameter] : parameters) {
      if (bit < 0 || (bits >> bit & 1U) != 0) expected.push_back(parameter);
    }
    MultiHeadAttention layer = make(options);
    EXPECT_EQ(named_shapes(layer), expected) << bits;
    std::int64_t count = 0;
    for (const Parameter* parameter : layer.parameters()) count += parameter->num_elements();
    EXPECT_EQ(layer.parameter_count(), count) << bits;
    for (const auto& [bit, parameter] : parameters) {
      EXPECT_EQ(layer.has_parameter(parameter.first), bit < 0 || (bits >> bit & 1U) != 0);
    }
  }
}

TEST_P(MultiHeadApi, EightParametersWithAllBiases) {
  MultiHeadAttention layer = make({.embed_dim = 64,
                                   .num_heads = 4,
                                   .num_kv_heads = 1,
                                   .query_bias = true,
                                   .key_bias = true,
                                   .value_bias = true,
                                   .out_bias = true});
  EXPECT_EQ(layer.named_parameters().size(), 8U);
  EXPECT_EQ(layer.parameter_count(), 10240 + 64 + 16 + 16 + 64);
  const std::vector<Parameter*> pointers = layer.parameters();
  ASSERT_EQ(pointers.size(), 8U);
  for (std::size_t i = 0; i < 8; ++i) EXPECT_EQ(pointers[i], &layer.named_parameters()[i]);
  EXPECT_EQ(&layer.parameter("k_proj.bias"), pointers[3]);
}

// ---- initial weights -------------------------------------------------------------------------

TEST_P(MultiHeadApi, InitialWeightsAreUniformWithinXaviersBound) {
  const MultiHeadAttention layer = make({.embed_dim = 100,
                                         .num_heads = 4,
                                         .num_kv_heads = 2,
                                         .key_dim = 80,
                                         .value_input_dim = 120,
                                         .dtype = DType::kF64},
                                        3);
  for (const Parameter& parameter : layer.named_parameters()) {
    const double count = static_cast<double>(parameter.num_elements());
    const auto fans = static_cast<double>(parameter.value.size(0) + parameter.value.size(1));
    const double bound = std::sqrt(6 / fans);
    double sum = 0, squares = 0, fourths = 0, largest = 0;
    for (const double value : elements_of(parameter.value)) {
      sum += value;
      squares += value * value;
      fourths += value * value * value * value;
      largest = std::max(largest, std::fabs(value));
    }
    EXPECT_LE(largest, bound) << parameter.name;
    EXPECT_GE(largest, 0.99 * bound) << parameter.name;
    // Five standard deviations of each estimate.
    EXPECT_NEAR(sum / count, 0, 5 * bound / std::sqrt(3 * count)) << parameter.name;
    EXPECT_NEAR(squares / count, bound * bound / 3, 5 * bound * bound * std::sqrt(4 / (45 * count)))
        << parameter.name;
    EXPECT_NEAR(fourths / count, std::pow(bound, 4) / 5,
                5 * std::pow(bound, 4) * std::sqrt(16 / (225 * count)))
        << parameter.name;
  }
}

TEST_P(MultiHeadApi, BiasesAndSinksStartAtZeroNormsAtOneWithoutGradients) {
  const MultiHeadAttention layer = make({.embed_dim = 8,
                                         .num_heads = 2,
                                         .query_bias = true,
                                         .key_bias = true,
                                         .value_bias = true,
                                         .out_bias = true,
                                         .qk_norm = true,
                                         .sinks = true,
                                         .dtype = DType::kBF16},
                                        5);
  for (const Parameter& parameter : layer.named_parameters()) {
    EXPECT_TRUE(parameter.gradient.view().absent());
    if (parameter.name.find("proj.weight") != std::string::npos) continue;
    const double expected = parameter.name.find("norm") != std::string::npos ? 1 : 0;
    for (const double value : elements_of(parameter.value)) EXPECT_EQ(value, expected);
  }
}

TEST_P(MultiHeadApi, PinnedWeights) {
  // Worked from Philox 4x32-10 by a separate program: sqrt(6 / (in + out)) * (2 u - 1), u the top
  // 53 bits of the first two words of block [i, stream] under the seed, streams 0 to 3.
  const auto layer = there(MultiHeadAttention::mqa(64, 4, kSeed));
  const std::pair<const char*, std::array<float, 3>> expected[] = {
      {"q_proj.weight", {-0.0131596858F, -0.0530895293F, -0.0942577198F}},
      {"k_proj.weight", {-0.190452352F, 0.0882217586F, -0.0928402692F}},
      {"v_proj.weight", {-0.192891732F, -0.0544285253F, -0.186575115F}},
      {"out_proj.weight", {0.0607330762F, 0.00725729531F, 0.053705398F}}};
  for (const auto& [name, numbers] : expected) {
    const std::vector<double> weight = elements_of(layer.parameter(name).value);
    EXPECT_EQ(weight[0], static_cast<double>(numbers[0])) << name;
    EXPECT_EQ(weight[1], static_cast<double>(numbers[1])) << name;
    EXPECT_EQ(weight.back(), static_cast<double>(numbers[2])) << name;
  }
}

TEST_P(MultiHeadApi, OtherTypesRoundTheSameWeights) {
  const MultiHeadAttentionOptions options{.embed_dim = 12, .num_heads = 3, .dtype = DType::kF64};
  const MultiHeadAttention exact = make(options, kSeed);
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    MultiHeadAttentionOptions narrow = options;
    narrow.dtype = dtype;
    const MultiHeadAttention layer = make(narrow, kSeed);
    for (const Parameter& parameter : exact.named_parameters()) {
      const Tensor rounded = Tensor::copy_of(context_, parameter.value, dtype);
      EXPECT_EQ(elements_of(layer.parameter(parameter.name).value), elements_of(rounded));
    }
  }
}

TEST_P(MultiHeadApi, SeedsAndStreams) {
  const auto drawn = [&](std::uint64_t seed) {
    return there(MultiHeadAttention::gqa(24, 4, 2, seed));
  };
  EXPECT_EQ(weights_of(drawn(7)), weights_of(drawn(7)));
  for (const std::uint64_t other : {std::uint64_t{8}, std::uint64_t{7} << 32}) {
    const auto first = drawn(7);
    const auto second = drawn(other);
    for (const Parameter& parameter : first.named_parameters()) {
      const auto a = elements_of(parameter.value);
      const auto b = elements_of(second.parameter(parameter.name).value);
      std::size_t same = 0;
      for (std::size_t i = 0; i < a.size(); ++i) same += a[i] == b[i] ? 1U : 0U;
      EXPECT_EQ(same, 0U) << parameter.name;
    }
  }
  EXPECT_EQ(weights_of(there(MultiHeadAttention::mha(8, 2))),
            weights_of(there(MultiHeadAttention::mha(8, 2, 0))));
  // Each projection has a stream of its own: k and v, of one shape, differ; a bias moves nothing.
  const auto plain = drawn(7);
  EXPECT_NE(elements_of(plain.parameter("k_proj.weight").value),
            elements_of(plain.parameter("v_proj.weight").value));
  const MultiHeadAttention biased = make(
      {.embed_dim = 24, .num_heads = 4, .num_kv_heads = 2, .query_bias = true, .sinks = true}, 7);
  for (const Parameter& parameter : plain.named_parameters()) {
    EXPECT_EQ(elements_of(parameter.value), elements_of(biased.parameter(parameter.name).value));
  }
}

// ---- a real model ----------------------------------------------------------------------------

class LargeMultiHead : public MultiHeadApi {};
INSTANTIATE_TEST_SUITE_P(FastestPlaces, LargeMultiHead, testing::ValuesIn(test::fastest_places()),
                         test::place_name);

TEST_P(LargeMultiHead, Llama3BuildsAndRuns) {
  const Tensor x = normal(DType::kF32, {1, 2, 4096}, 1);
  std::vector<double> outs[2];
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MultiHeadAttention layer = make({.embed_dim = 4096,
                                           .num_heads = 32,
                                           .num_kv_heads = 8,
                                           .head_dim = 128,
                                           .causal = true,
                                           .rope = RopeOptions{.base = 500000},
                                           .dtype = dtype},
                                          1);
    EXPECT_EQ(layer.parameter_count(), 2 * 4096 * 4096 + 2 * 1024 * 4096);
    EXPECT_EQ(layer.parameter("k_proj.weight").value.shape(), (Dims{1024, 4096}));
    const Tensor input = Tensor::copy_of(context_, x, dtype);
    const Tensor out = layer.forward(context_, input.view());
    EXPECT_EQ(out.shape(), (Dims{1, 2, 4096}));
    EXPECT_EQ(out.dtype(), dtype);
    outs[dtype == DType::kF32 ? 0 : 1] = elements_of(out);
  }
  double difference = 0, size = 0;
  for (std::size_t i = 0; i < outs[0].size(); ++i) {
    ASSERT_TRUE(std::isfinite(outs[0][i]) && std::isfinite(outs[1][i]));
    difference += std::pow(outs[0][i] - outs[1][i], 2);
    size += std::pow(outs[0][i], 2);
  }
  EXPECT_GT(size, 1);
  EXPECT_LT(std::sqrt(difference / size), 0.01);  // 2^-8 for each of weights, inputs and steps
}

}  // namespace
}  // namespace ladon
