// Where the factors of balance_channels() are.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "convert/balance_support.h"

namespace ladon {
namespace {

using namespace test::balance;
using test::host_context;
using test::random_layer;
using test::random_tensor;
using test::Rows;

/// The factor of each row of a parameter, which all its elements have.
std::vector<double> factors_of(MultiHeadAttention before, MultiHeadAttention after,
                               const std::string& name, bool of_columns = false) {
  Rows from(before, name);
  Rows to(after, name);
  const std::int64_t rows = before.parameter(name).value.num_elements() / from.columns;
  const std::int64_t count = of_columns ? from.columns : rows;
  std::vector<double> factors;
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t others = of_columns ? rows : from.columns;
    double factor = 0;
    for (std::int64_t m = 0; m < others; ++m) {
      const double ratio = of_columns ? to(m, n) / from(m, n) : to(n, m) / from(n, m);
      if (m > 0) {
        EXPECT_EQ(ratio, factor) << name << " " << n;
      }
      factor = ratio;
    }
    EXPECT_EQ(std::exp2(std::rint(std::log2(factor))), factor) << name << " " << n;
    factors.push_back(factor);
  }
  return factors;
}

TEST(BalanceFactors, GroupsAndPairsShareFactors) {
  for (const Variant& variant : variants()) {
    if (variant.options.qk_norm) continue;
    SCOPED_TRACE(variant.name);
    const MultiHeadAttention layer = with_outliers(variant.options);
    const MultiHeadAttention balanced = balance_channels(host_context(), layer).layer;
    const auto factors = [&](const std::string& name, bool of_columns = false) {
      return factors_of(layer, balanced, name, of_columns);
    };
    const auto keys = factors("k_proj.weight");
    const auto values = factors("v_proj.weight");
    const auto queries = factors("q_proj.weight");
    const auto outputs = factors("out_proj.weight", true);
    if (layer.has_parameter("k_proj.bias")) {
      EXPECT_EQ(factors("k_proj.bias"), keys);
    }
    if (layer.has_parameter("v_proj.bias")) {
      EXPECT_EQ(factors("v_proj.bias"), values);
    }
    if (layer.has_parameter("q_proj.bias")) {
      EXPECT_EQ(factors("q_proj.bias"), queries);
    }
    if (layer.has_parameter("out_proj.bias")) {
      EXPECT_EQ(factors("out_proj.bias"), std::vector<double>(kEmbed, 1));
    }
    const std::int64_t group = 4 / layer.num_kv_heads();
    for (std::size_t row = 0; row < queries.size(); ++row) {
      const std::size_t read = row / kDim / static_cast<std::size_t>(group) * kDim + row % kDim;
      EXPECT_EQ(queries[row] * keys[read], 1) << row;
      EXPECT_EQ(outputs[row] * values[read], 1) << row;
    }
    // Key channel 3 is an outlier, with its partner where rope rotates it.
    const auto& rope = layer.options().rope;
    const std::int64_t rotary = !rope ? 0 : rope->rotary_dim == 0 ? kDim : rope->rotary_dim;
    const bool interleaved = rope && rope->layout == RopeLayout::kInterleaved;
    for (std::int64_t n = 0; n < rotary / 2; ++n) {
      const auto a = static_cast<std::size_t>(interleaved ? 2 * n : n);
      const auto b = static_cast<std::size_t>(interleaved ? 2 * n + 1 : n + rotary / 2);
      EXPECT_EQ(keys[a], keys[b]) << n;
    }
    EXPECT_LE(keys[3], 1.0 / 8);
    EXPECT_LE(values[5], 1.0 / 4);
    EXPECT_GE(*std::min_element(keys.begin() + kDim / 2 + 4, keys.end()), 0.25);
  }
}

TEST(BalanceFactors, UnrotatedChannelsHaveFactorsOfTheirOwn) {
  MultiHeadAttentionOptions options = options_of();
  options.rope = RopeOptions{.rotary_dim = 8};
  auto layer = random_layer(MultiHeadAttention(options), 1);
  multiply_channels(layer, "k_proj", {1, 10}, 64);
  const auto keys =
      factors_of(layer, balance_channels(host_context(), layer).layer, "k_proj.weight");
  EXPECT_LE(keys[1], 1.0 / 16);
  EXPECT_EQ(keys[5], keys[1]);  // its partner
  EXPECT_LE(keys[10], 1.0 / 16);
  for (const std::size_t other : {0U, 2U, 3U, 4U, 6U, 7U, 8U, 9U, 11U}) EXPECT_GE(keys[other], 0.5);
}

TEST(BalanceFactors, FactorsOfNormedKeysAreInTheNorms) {
  for (const Variant& variant : variants()) {
    if (!variant.options.qk_norm) continue;
    SCOPED_TRACE(variant.name);
    const MultiHeadAttention layer = with_outliers(variant.options);
    const MultiHeadAttention balanced = balance_channels(host_context(), layer).layer;
    for (const char* const name : {"q_proj.weight", "k_proj.weight", "k_proj.bias"}) {
      EXPECT_EQ(bits_of(balanced.parameter(name).value), bits_of(layer.parameter(name).value));
    }
    // Rows of [heads, head_dim] would be compared as a whole; as vectors all norms are alike.
    const auto factors = [&](const std::string& name) {
      const Tensor& before = layer.parameter(name).value;
      const Tensor& after = balanced.parameter(name).value;
      std::vector<double> result;
      for (std::int64_t i = 0; i < before.num_elements(); ++i) {
        result.push_back(after.data_as<double>()[i] / before.data_as<double>()[i]);
      }
      return result;
    };
    const auto keys = factors("k_norm.weight");
    const auto queries = factors("q_norm.weight");
    const bool shared = variant.options.qk_norm_span == QkNormSpan::kHead;
    ASSERT_EQ(keys.size(), shared ? 12U : 24U);
    for (std::size_t row = 0; row < queries.size(); ++row) {
      const std::size_t read = shared ? row : row / kDim / 2 * kDim + row % kDim;
      EXPECT_EQ(queries[row] * keys[read], 1) << row;
      EXPECT_EQ(keys[read], keys[read % kDim < 6 ? read + 6 : read - 6]);  // its partner
    }
    EXPECT_LE(keys[3], 1.0 / 8);
    if (!shared) {  // the other head has no outlier there
      EXPECT_GE(keys[15], 0.25);
    }
  }
}

TEST(BalanceFactors, AnOffsetOfNormsLeavesKeysAlone) {
  MultiHeadAttentionOptions options = options_of();
  options.qk_norm = true;
  options.qk_norm_offset = 1;
  const MultiHeadAttention layer = with_outliers(options);
  const auto [balanced, summary] = balance_channels(host_context(), layer);
  EXPECT_FALSE(summary.keys_balanced);
  EXPECT_EQ(summary.key_spread_before, 1);
  EXPECT_LT(summary.value_spread_after, 2);
  for (const char* const name : {"q_norm.weight", "k_norm.weight", "k_proj.weight"}) {
    EXPECT_EQ(bits_of(balanced.parameter(name).value), bits_of(layer.parameter(name).value));
  }
  const Tensor x = random_tensor({1, 9, kEmbed}, 5);
  EXPECT_EQ(bits_of(balanced.forward(host_context(), x)),
            bits_of(layer.forward(host_context(), x)));
}

}  // namespace
}  // namespace ladon
