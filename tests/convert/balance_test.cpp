// balance_channels(): exact over floats, smaller errors over int8, weights within their range.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "convert/balance_support.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using namespace test::balance;
using test::error_of;
using test::host_context;
using test::random_layer;
using test::random_tensor;
using test::Rows;

/// The output of 9 tokens at once and then one by one.
std::string cached_bits(const MultiHeadAttention& layer, const Tensor& x, std::int64_t prompt) {
  KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(x.size(0)));
  std::string bits;
  for (std::int64_t t = 0; t < x.size(1); t += t == 0 ? prompt : 1) {
    const std::int64_t end = t == 0 ? prompt : t + 1;
    bits += bits_of(layer.forward(host_context(), x.view().slice(1, t, end), cache));
  }
  return bits;
}

std::string gradient_bits(MultiHeadAttention& layer, const Tensor& x) {
  const TrainingForward forward = layer.forward_training(host_context(), {.query = x});
  return bits_of(forward.out) +
         bits_of(layer.backward(host_context(), forward.out, forward.saved).query);
}

TEST(Balance, KeepsTheBitsOfFloats) {
  for (const Variant& variant : variants()) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(variant.name + ", " + name_of(dtype));
      MultiHeadAttention layer = in_dtype(with_outliers(variant.options), dtype);
      auto [balanced, summary] = balance_channels(host_context(), layer);
      EXPECT_GE(summary.largest_factor, 8);
      EXPECT_GT(summary.key_spread_before, 6);
      EXPECT_GT(summary.value_spread_before, 6);
      EXPECT_LT(summary.key_spread_after, 2);
      EXPECT_LT(summary.value_spread_after, 2);
      EXPECT_TRUE(summary.keys_balanced);
      EXPECT_EQ(summary.limited, 0);
      EXPECT_NE(bits_of(balanced.parameter("v_proj.weight").value),
                bits_of(layer.parameter("v_proj.weight").value));
      const Tensor x = random_tensor({2, 14, kEmbed}, 5, dtype);
      EXPECT_EQ(bits_of(balanced.forward(host_context(), x)),
                bits_of(layer.forward(host_context(), x)));
      EXPECT_EQ(cached_bits(balanced, x, 9), cached_bits(layer, x, 9));
      EXPECT_EQ(gradient_bits(balanced, x), gradient_bits(layer, x));
    }
  }
}

// ---- Over quantised caches ---------------------------------------------------------------------

/// |quantised - float| / |float| over the outputs of a prompt and a few decoding steps.
double cache_error(const MultiHeadAttention& layer, const Tensor& x, DType format) {
  KvCache quantised = KvCache::contiguous(host_context(), layer.cache_options(1, format));
  KvCache exact = KvCache::contiguous(host_context(), layer.cache_options(1));
  double error = 0;
  double norm = 0;
  const std::int64_t prompt = x.size(1) - 8;
  for (std::int64_t t = 0; t < x.size(1); t += t == 0 ? prompt : 1) {
    const ConstTensorView chunk = x.view().slice(1, t, t == 0 ? prompt : t + 1);
    const Tensor got = layer.forward(host_context(), chunk, quantised);
    const Tensor expected = layer.forward(host_context(), chunk, exact);
    for (std::int64_t i = 0; i < got.num_elements(); ++i) {
      const auto right = static_cast<double>(expected.data_as<float>()[i]);
      const auto read = static_cast<double>(got.data_as<float>()[i]);
      error += (read - right) * (read - right);
      norm += right * right;
    }
  }
  return std::sqrt(error / norm);
}

TEST(Balance, QuantisedCachesLoseLess) {
  const MultiHeadAttentionOptions options{.embed_dim = 128,
                                          .num_heads = 8,
                                          .num_kv_heads = 2,
                                          .head_dim = 64,
                                          .causal = true,
                                          .rope = RopeOptions{},
                                          .dtype = DType::kF64};
  const auto source = random_layer(MultiHeadAttention(options), 1);
  const Tensor x = random_tensor({1, 300, 128}, 2, DType::kF32);
  const MultiHeadAttention plain = in_dtype(source, DType::kF32);
  std::printf("error of a cache, %%: without outliers, with them, balanced\n");
  // Outliers that what reads them makes small again leave the layer's function as it was, and the
  // other channels decide. Where it does not, the outliers do.
  for (const bool undone : {false, true}) {
    MultiHeadAttention changed = source;
    for (const std::int64_t head : {0, 1}) {
      const std::int64_t first = 64 * head;
      multiply_channels(changed, "k_proj", {first + 40}, 20);
      multiply_channels(changed, "v_proj", {first + 3, first + 17, first + 30, first + 55}, 10);
      for (std::int64_t h = 4 * head; undone && h < 4 * (head + 1); ++h) {
        multiply_channels(changed, "q_proj", {64 * h + 40}, 1.0 / 20);
        Rows out(changed, "out_proj.weight");
        for (const std::int64_t channel : {3, 17, 30, 55}) {
          for (std::int64_t row = 0; row < 128; ++row) out(row, 64 * h + channel) /= 10;
        }
      }
    }
    const MultiHeadAttention layer = in_dtype(changed, DType::kF32);
    const BalancedMultiHead result = balance_channels(host_context(), layer);
    const MultiHeadAttention& balanced = result.layer;
    const auto print = [&](DType format) {
      std::printf("%s, %s: %.2f %.2f %.2f\n", name_of(format), undone ? "undone" : "not undone",
                  100 * cache_error(plain, x, format), 100 * cache_error(layer, x, format),
                  100 * cache_error(balanced, x, format));
    };
    print(DType::kI8);
    print(DType::kF8E4M3);
    const double before = cache_error(layer, x, DType::kI8);
    const double after = cache_error(balanced, x, DType::kI8);
    EXPECT_GT(before, 0.03);
    EXPECT_LT(after, before / (undone ? 3 : 2));
    EXPECT_LT(after, cache_error(layer, x, DType::kF8E4M3));  // a format for outliers
    EXPECT_GT(result.summary.key_spread_before, 10);
    EXPECT_LT(result.summary.key_spread_after, 2);
  }
}

// ---- Calibration, range and refusals -----------------------------------------------------------

/// Values, keys and queries are the inputs themselves: 2 heads of 4 channels.
MultiHeadAttention identity_layer(DType dtype = DType::kF64) {
  MultiHeadAttention layer =
      MultiHeadAttention::zeros({.embed_dim = 8, .num_heads = 2, .dtype = dtype});
  Tensor identity(DType::kF64, {8, 8});
  for (std::int64_t n = 0; n < 8; ++n) identity.data_as<double>()[9 * n] = 1;
  for (const char* const name : {"q_proj", "k_proj", "v_proj", "out_proj"}) {
    layer.set_parameter(host_context(), std::string(name) + ".weight", identity);
  }
  return layer;
}

double diagonal(const MultiHeadAttention& layer, const std::string& name, std::int64_t row) {
  return in_dtype(layer, DType::kF64).parameter(name).value.data_as<double>()[9 * row];
}

TEST(Balance, CalibrationKnowsTheInputs) {
  const MultiHeadAttention layer = identity_layer();
  const auto white = balance_channels(host_context(), layer);
  EXPECT_EQ(white.summary.largest_factor, 1);
  EXPECT_EQ(white.summary.key_spread_before, 1);
  // Element 1 is 16 times as large as the others, element 6 has a mean of 32.
  Tensor x = random_tensor({400, 8}, 3);
  for (std::int64_t t = 0; t < 400; ++t) {
    x.data_as<double>()[8 * t + 1] *= 16;
    x.data_as<double>()[8 * t + 6] += 32;
  }
  Calibration calibration(8);
  calibration.add(host_context(), x);
  const auto [balanced, summary] = balance_channels(host_context(), layer, &calibration);
  for (std::int64_t n = 0; n < 8; ++n) {
    const double expected = n == 1 ? 1.0 / 16 : n == 6 ? 1.0 / 32 : 1;
    EXPECT_EQ(diagonal(balanced, "k_proj.weight", n), expected) << n;
    EXPECT_EQ(diagonal(balanced, "v_proj.weight", n), expected) << n;
    EXPECT_EQ(diagonal(balanced, "q_proj.weight", n), 1 / expected) << n;
    EXPECT_EQ(diagonal(balanced, "out_proj.weight", n), 1 / expected) << n;
  }
  EXPECT_EQ(summary.largest_factor, 32);
  EXPECT_NEAR(summary.key_spread_before, 32, 3);
  EXPECT_NEAR(summary.value_spread_after, 1, 0.3);
}

TEST(Balance, ZeroChannelsKeepAFactorOfOne) {
  const auto [none, empty] =
      balance_channels(host_context(), MultiHeadAttention::zeros({.embed_dim = 8, .num_heads = 2}));
  EXPECT_EQ(empty.largest_factor, 1);
  EXPECT_EQ(empty.key_spread_before, 1);
  MultiHeadAttention layer = identity_layer();
  layer.parameter("k_proj.weight").value.data_as<double>()[0] = 0;
  layer.parameter("v_proj.weight").value.data_as<double>()[9] = 64;
  const MultiHeadAttention balanced = balance_channels(host_context(), layer).layer;
  EXPECT_EQ(diagonal(balanced, "k_proj.weight", 0), 0);
  EXPECT_EQ(diagonal(balanced, "q_proj.weight", 0), 1);
  EXPECT_EQ(diagonal(balanced, "v_proj.weight", 1), 1);
  EXPECT_EQ(diagonal(balanced, "out_proj.weight", 1), 64);
}

TEST(Balance, WeightsStayInTheirRange) {
  // Key channel 1 should get 1 / 64, and its query 64.
  const auto balanced_with = [](DType dtype, double key, double small, double query) {
    MultiHeadAttention wide = in_dtype(identity_layer(), DType::kF64);
    wide.parameter("k_proj.weight").value.data_as<double>()[9] = key;
    wide.parameter("k_proj.weight").value.data_as<double>()[10] = small;
    wide.parameter("q_proj.weight").value.data_as<double>()[9] = query;
    return balance_channels(host_context(), in_dtype(wide, dtype));
  };
  const auto expect = [](const BalancedMultiHead& got, double key, std::int64_t limited) {
    EXPECT_EQ(diagonal(got.layer, "k_proj.weight", 1), key);
    EXPECT_EQ(got.summary.limited, limited);
  };
  const double smallest = std::ldexp(1.0, -14);  // normal in f16
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32, DType::kF64}) {
    expect(balanced_with(dtype, 64, 0, 1), 1, 0);
    expect(balanced_with(dtype, 64, 64 * smallest, 1), 1, 0);
    const bool narrow = dtype == DType::kF16;
    expect(balanced_with(dtype, 64, 2 * smallest, 1), narrow ? 32 : 1, narrow ? 1 : 0);
    expect(balanced_with(dtype, 64, smallest / 2, 1), narrow ? 64 : 1, narrow ? 1 : 0);
    // Queries may not come above 512 in f16, because their peaks are larger.
    expect(balanced_with(dtype, 64, 0, 128), narrow ? 16 : 1, narrow ? 1 : 0);
    expect(balanced_with(dtype, 64, 0, 2048), narrow ? 64 : 1, narrow ? 1 : 0);
  }
  const double large = std::ldexp(1.0, 125);
  expect(balanced_with(DType::kF32, 64, 0, large), 16, 1);
  const double tiny = std::ldexp(1.0, -124);
  expect(balanced_with(DType::kBF16, 64, tiny, 1), 16, 1);
  // However far off, a factor has 16 bits at most.
  expect(balanced_with(DType::kF64, std::ldexp(1.0, 40), 0, 1), std::ldexp(1.0, 24), 1);
}

TEST(Balance, Errors) {
  const auto refused = [](const MultiHeadAttention& layer, const Calibration* calibration,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    return error_of([&] { balance_channels(host_context(), layer, calibration); }, code);
  };
  const MultiHeadAttention layer = identity_layer();
  const Calibration narrow(4);
  EXPECT_EQ(refused(layer, &narrow),
            "balance_channels: calibration: got a width of 4, expected embed_dim = 8");
  const Calibration empty(8);
  EXPECT_EQ(refused(layer, &empty),
            "balance_channels: calibration: got no tokens, expected some inputs of the layer");
  const MultiHeadAttention cross({.embed_dim = 8, .num_heads = 2, .key_dim = 6});
  EXPECT_EQ(refused(cross, nullptr, ErrorCode::kUnsupported),
            "balance_channels: key_dim: got 6, expected embed_dim = 8: only self-attention is "
            "converted");
  MultiHeadAttention bad = layer;
  bad.parameter("out_proj.weight").value.data_as<double>()[3] =
      std::numeric_limits<double>::infinity();
  EXPECT_EQ(refused(bad, nullptr),
            "balance_channels: layer: got numbers in out_proj.weight that are not finite");
}

}  // namespace
}  // namespace ladon
