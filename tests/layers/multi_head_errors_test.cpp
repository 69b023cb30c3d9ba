// Every refusal of MultiHeadAttention's options and parameters: the whole message, and a layer that
// is as it was. multi_head_call_errors_test.cpp has the refusals of its calls.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ladon/alibi.h"
#include "ladon/multi_head_attention.h"
#include "layers/multi_head_error_support.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMin = std::numeric_limits<std::int64_t>::min();

using Options = MultiHeadAttentionOptions;

/// Options that are legal until `spoil` gets at them.
void expect_refused(const std::function<void(Options&)>& spoil, const std::string& message,
                    ErrorCode code = ErrorCode::kInvalidArgument,
                    const std::string& operation = "MultiHeadAttention: ") {
  Options options{.embed_dim = 24, .num_heads = 6, .num_kv_heads = 3, .qk_norm = true};
  spoil(options);
  EXPECT_EQ(error_of([&] { MultiHeadAttention layer(options, 1); }, code), operation + message);
}

TEST(MultiHeadErrors, TheUnspoiledOptionsAreLegal) {
  EXPECT_NO_THROW(MultiHeadAttention({.embed_dim = 24, .num_heads = 6, .num_kv_heads = 3}));
}

TEST(MultiHeadErrors, Dimensions) {
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-1}, kMin}) {
    const std::string got = ": got " + std::to_string(bad) + ", expected 1 or more";
    expect_refused([=](Options& options) { options.embed_dim = bad; }, "embed_dim" + got);
    expect_refused([=](Options& options) { options.num_heads = bad; }, "num_heads" + got);
  }
  const std::pair<const char*, std::int64_t Options::*> optional[] = {
      {"num_kv_heads", &Options::num_kv_heads},
      {"head_dim", &Options::head_dim},
      {"key_dim", &Options::key_dim},
      {"value_input_dim", &Options::value_input_dim}};
  for (const auto& [name, member] : optional) {
    for (const std::int64_t bad : {std::int64_t{-1}, kMin}) {
      expect_refused([&, member = member](Options& options) { options.*member = bad; },
                     std::string(name) + ": got " + std::to_string(bad) + ", expected 0 or more");
    }
  }
}

TEST(MultiHeadErrors, NothingAtAll) {
  EXPECT_EQ(error_of([] { MultiHeadAttention layer(Options{}); }),
            "MultiHeadAttention: embed_dim: got 0, expected 1 or more");
}

TEST(MultiHeadErrors, NamedConstructors) {
  const auto gqa = [](std::int64_t embed, std::int64_t heads, std::int64_t kv_heads) {
    return error_of([=] { MultiHeadAttention::gqa(embed, heads, kv_heads); });
  };
  // 0 is a default among the options; here it is a mistake.
  EXPECT_EQ(gqa(24, 6, 0), "MultiHeadAttention: num_kv_heads: got 0, expected 1 or more");
  EXPECT_EQ(gqa(24, 6, -2), "MultiHeadAttention: num_kv_heads: got -2, expected 1 or more");
  EXPECT_EQ(gqa(24, 6, 4),
            "MultiHeadAttention: num_kv_heads: got 4, expected a divisor of num_heads = 6");
  EXPECT_EQ(error_of([] { MultiHeadAttention::mqa(24, 0); }),
            "MultiHeadAttention: num_heads: got 0, expected 1 or more");
  EXPECT_EQ(error_of([] { MultiHeadAttention::mqa(0, 2); }),
            "MultiHeadAttention: embed_dim: got 0, expected 1 or more");
  EXPECT_EQ(error_of([] { MultiHeadAttention::mha(-24, 6); }),
            "MultiHeadAttention: embed_dim: got -24, expected 1 or more");
  // The heads of mha are its KV heads too; the caller gave no KV heads.
  EXPECT_EQ(error_of([] { MultiHeadAttention::mha(24, 0); }),
            "MultiHeadAttention: num_heads: got 0, expected 1 or more");
}

TEST(MultiHeadErrors, HeadsThatDoNotDivide) {
  expect_refused([](Options& options) { options.num_kv_heads = 4; },
                 "num_kv_heads: got 4, expected a divisor of num_heads = 6");
  for (const std::int64_t more : {std::int64_t{7}, std::int64_t{12}, kMax}) {
    expect_refused(
        [=](Options& options) { options.num_kv_heads = more; },
        "num_kv_heads: got " + std::to_string(more) + ", expected a divisor of num_heads = 6");
  }
  const auto heads = [](Options& options) { options.num_heads = options.num_kv_heads = 5; };
  expect_refused(heads,
                 "num_heads: got 5, expected a divisor of embed_dim = 24 because head_dim is not "
                 "given");
  expect_refused([](Options& options) { options.num_heads = options.num_kv_heads = 25; },
                 "num_heads: got 25, expected a divisor of embed_dim = 24 because head_dim is not "
                 "given");
  // With a head_dim it need not divide.
  Options given{.embed_dim = 24, .num_heads = 5, .head_dim = 3};
  EXPECT_EQ(MultiHeadAttention(given).parameter("q_proj.weight").value.shape(), (Dims{15, 24}));
}

TEST(MultiHeadErrors, Slopes) {
  const auto slopes = [](std::vector<double> values) {
    return [values](Options& options) { options.alibi_slopes = values; };
  };
  expect_refused(slopes({1, 2, 3}),
                 "alibi_slopes: got 3 of them, expected one for each of 6 heads, or none");
  expect_refused(slopes(std::vector<double>(7, 1)),
                 "alibi_slopes: got 7 of them, expected one for each of 6 heads, or none");
  expect_refused(slopes({1, 2, 3, 4, 5, kInfinity}),
                 "alibi_slopes: got inf, expected a finite number");
  expect_refused(slopes({kNaN, 2, 3, 4, 5, 6}), "alibi_slopes: got nan, expected a finite number");
  for (const std::int64_t bad : {std::int64_t{0}, std::int64_t{-4}, kMin}) {
    EXPECT_EQ(error_of([&] { alibi_slopes(bad); }),
              "alibi_slopes: num_heads: got " + std::to_string(bad) + ", expected 1 or more");
  }
  EXPECT_EQ(error_of([] { alibi_slopes(kMax); }, ErrorCode::kOutOfMemory),
            "alibi_slopes: num_heads: got " + std::to_string(kMax) +
                ", expected a size that fits the memory");
}

TEST(MultiHeadErrors, RotaryDims) {
  const auto rotary = [](std::int64_t dim) {
    return [=](Options& options) { options.rope = RopeOptions{.rotary_dim = dim}; };
  };
  for (const std::int64_t bad : {std::int64_t{3}, std::int64_t{1}, std::int64_t{-2},
                                 std::int64_t{6}, std::int64_t{5}, kMax, kMin}) {
    expect_refused(rotary(bad), "rope.rotary_dim: got " + std::to_string(bad) +
                                    ", expected an even number up to head_dim = 4, or 0 for all of "
                                    "it");
  }
  expect_refused(
      [](Options& options) {
        options.head_dim = 5;
        options.rope = RopeOptions{};
      },
      "rope.rotary_dim: got 0 for all of a head_dim of 5, expected an even number");
  EXPECT_NO_THROW(MultiHeadAttention(
      {.embed_dim = 24, .num_heads = 6, .head_dim = 5, .rope = RopeOptions{.rotary_dim = 4}}));
}

TEST(MultiHeadErrors, RopesThatNoCallCouldUse) {
  const auto refuse = [](const RopeOptions& rope, const std::string& message) {
    expect_refused([&](Options& options) { options.rope = rope; }, message,
                   ErrorCode::kInvalidArgument, "MultiHeadAttention: rope.");
  };
  refuse({.base = 0}, "base: got 0, expected a positive finite number");
  refuse({.base = -10000}, "base: got -10000, expected a positive finite number");
  refuse({.base = kNaN}, "base: got nan, expected a positive finite number");
  refuse({.base = kInfinity}, "base: got inf, expected a positive finite number");
  refuse({.base = 1e-300},
         "base: got 1e-300 with scaling.factor 1, expected angles that are finite");
  refuse({.scaling = {.kind = RopeScaling::kLinear, .factor = 0}},
         "scaling.factor: got 0, expected a positive finite number");
  refuse({.frequencies = {1, 2, 3}},
         "frequencies: got 3 of them, expected 2, one for each pair of rotary_dim 4");
  refuse({.magnitude = 2}, "magnitude: got 2 without explicit frequencies, expected 1");
  refuse({.base = 1, .scaling = {.kind = RopeScaling::kYarn, .factor = 2}},
         "base: got 1, expected more than 1 for YaRN scaling");
  refuse({.scaling = {.kind = static_cast<RopeScaling>(9)}},
         "scaling.kind: got 9, expected a RopeScaling");
}

TEST(MultiHeadErrors, Numbers) {
  const std::pair<double, const char*> fractions[] = {
      {-0.1, "-0.1"}, {1, "1"}, {1.5, "1.5"}, {kNaN, "nan"}, {kInfinity, "inf"}};
  for (const auto& [bad, text] : fractions) {
    expect_refused([bad = bad](Options& options) { options.dropout = bad; },
                   std::string("dropout: got ") + text + ", expected a number in [0, 1)");
  }
  const std::pair<double, const char*> infinite[] = {
      {kNaN, "nan"}, {kInfinity, "inf"}, {-kInfinity, "-inf"}};
  for (const auto& [bad, text] : infinite) {
    const std::string got = std::string(": got ") + text + ", expected a finite number";
    expect_refused([bad = bad](Options& options) { options.scale = bad; }, "scale" + got);
    expect_refused([bad = bad](Options& options) { options.softcap = bad; }, "softcap" + got);
  }
  expect_refused([](Options& options) { options.softcap = -1; },
                 "softcap: got -1, expected a positive number, or 0 for none");
  const std::pair<double, const char*> epsilons[] = {
      {0, "0"}, {-1e-6, "-1e-06"}, {kNaN, "nan"}, {kInfinity, "inf"}};
  for (const auto& [bad, text] : epsilons) {
    expect_refused([bad = bad](Options& options) { options.qk_norm_epsilon = bad; },
                   std::string("qk_norm_epsilon: got ") + text + ", expected a positive number");
  }
  expect_refused([](Options& options) { options.qk_norm_offset = kNaN; },
                 "qk_norm_offset: got nan, expected a finite number");
  expect_refused([](Options& options) { options.qk_norm_span = QkNormSpan{7}; },
                 "qk_norm_span: got 7, expected a QkNormSpan");
  for (const std::int64_t bad : {std::int64_t{-1}, kMin}) {
    const std::string got = ": got " + std::to_string(bad) + ", expected 0 or more";
    expect_refused([=](Options& options) { options.window_left = bad; }, "window_left" + got);
    expect_refused([=](Options& options) { options.window_right = bad; }, "window_right" + got);
  }
  expect_refused([](Options& options) { options.dtype = DType::kBool; },
                 "dtype: got bool, expected f64, f32, f16 or bf16");
}

TEST(MultiHeadErrors, AnEpsilonIsReadWithTheNormOnly) {
  EXPECT_NO_THROW(MultiHeadAttention({.embed_dim = 4, .num_heads = 2, .qk_norm_epsilon = -1}));
}

TEST(MultiHeadErrors, SizesThatCannotBe) {
  expect_refused([](Options& options) { options.head_dim = kMax / 2; },
                 "head_dim: got 4611686018427387903 with 6 heads, expected a width that fits 64 "
                 "bits");
  expect_refused(
      [](Options& options) { options.head_dim = std::int64_t{1} << 58; },
      "shape: got [1729382256910270464, 24] of f32, expected a size that fits the address space",
      ErrorCode::kOutOfMemory, "Tensor: ");
  expect_refused([](Options& options) { options.key_dim = kMax; },
                 "shape: got [12, 9223372036854775807] of f32, expected a size that fits the "
                 "address space",
                 ErrorCode::kOutOfMemory, "Tensor: ");
  expect_refused(
      [](Options& options) {
        options.head_dim = kMax - 1;
        options.rope = RopeOptions{};
        options.num_heads = options.num_kv_heads = 1;
      },
      "rotary_dim: got 9223372036854775806, expected a size that fits the memory",
      ErrorCode::kOutOfMemory, "MultiHeadAttention: rope.");
}

// ---- parameters ------------------------------------------------------------------------------

TEST(MultiHeadErrors, UnknownParameters) {
  SentinelLayer sentinel({.embed_dim = 8, .num_heads = 2, .out_bias = true});
  MultiHeadAttention& layer = sentinel.layer();
  const std::string known =
      "expected one of q_proj.weight, k_proj.weight, v_proj.weight, out_proj.weight, out_proj.bias";
  const std::string start = "MultiHeadAttention::parameter: name: got ";
  EXPECT_EQ(error_of([&] { layer.parameter("o_proj.weight"); }),
            start + "\"o_proj.weight\", " + known);
  EXPECT_EQ(error_of([&] { std::as_const(layer).parameter(""); }), start + "\"\", " + known);
  EXPECT_EQ(error_of([&] { std::as_const(layer).parameter("q_proj"); }),
            start + "\"q_proj\", " + known);
  const Tensor value(DType::kF32, {8});
  EXPECT_EQ(error_of([&] { layer.set_parameter(host_context(), "q_proj.bias", value); }),
            "MultiHeadAttention::set_parameter: name: got \"q_proj.bias\", " + known);
  EXPECT_FALSE(layer.has_parameter("q_proj.bias"));
  sentinel.expect_unchanged();
}

TEST(MultiHeadErrors, ParametersThatDoNotFit) {
  SentinelLayer sentinel({.embed_dim = 8, .num_heads = 2, .num_kv_heads = 1, .key_bias = true});
  MultiHeadAttention& layer = sentinel.layer();
  const auto refuse = [&](const char* name, const ConstTensorView& value,
                          const std::string& message,
                          ErrorCode code = ErrorCode::kInvalidArgument) {
    EXPECT_EQ(error_of([&] { layer.set_parameter(host_context(), name, value); }, code),
              std::string("MultiHeadAttention::set_parameter: ") + name + ": " + message);
    sentinel.expect_unchanged();
  };
  const Tensor numbers(DType::kF32, {100});
  const auto shaped = [&](const Dims& shape) {
    return ConstTensorView(numbers.data(), DType::kF32, shape);
  };
  refuse("k_proj.weight", shaped({8, 4}), "got [8, 4], expected [4, 8]");
  refuse("k_proj.weight", shaped({8, 8}), "got [8, 8], expected [4, 8]");
  refuse("k_proj.weight", shaped({0, 8}), "got [0, 8], expected [4, 8]");
  refuse("k_proj.weight", shaped({32}), "got [32], expected 2 dimensions");
  refuse("k_proj.weight", shaped({1, 4, 8}), "got [1, 4, 8], expected 2 dimensions");
  refuse("k_proj.weight", {}, "got none, expected a tensor");
  refuse("k_proj.bias", shaped({5}), "got [5], expected [4]");
  refuse("k_proj.weight", ConstTensorView(numbers.data(), DType::kBool, {4, 8}),
         "got dtype bool, expected f64, f32, f16 or bf16");
  refuse("k_proj.weight", ConstTensorView(nullptr, DType::kF32, {4, 8}),
         "got a null pointer, expected data");
  refuse("k_proj.weight",
         ConstTensorView(static_cast<const char*>(numbers.data()) + 1, DType::kF32, {4, 8}),
         "got data that is not aligned, expected a multiple of 4 bytes");
  refuse("k_proj.weight", ConstTensorView(numbers.data(), DType::kF32, {4, 8}, Device::kCuda),
         "got memory of cuda:0, expected memory of cpu, where the call runs");
}

TEST(MultiHeadErrors, AParameterFromItsOwnMemory) {
  SentinelLayer sentinel({.embed_dim = 8, .num_heads = 2});
  MultiHeadAttention& layer = sentinel.layer();
  const ConstTensorView turned = layer.parameter("q_proj.weight").value.view().transpose(0, 1);
  EXPECT_EQ(error_of([&] { layer.set_parameter(host_context(), "q_proj.weight", turned); }),
            "copy: to: got memory that overlaps from, expected separate memory");
  sentinel.expect_unchanged();
}

}  // namespace
}  // namespace ladon::test
