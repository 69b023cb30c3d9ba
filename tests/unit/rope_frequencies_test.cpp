// Frequencies and magnitudes of rope() against numbers worked by hand, or with 30 digits by a
// program that is not this one; the table that is made of them; and what all three refuse.
//
// With base 10000 and rotary_dim 8 the plain frequencies are 1, 0.1, 0.01 and 0.001, and YaRN's
// "pair that rotates t times" is log10(original_context / (2 pi t)).
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numbers>
#include <string>
#include <vector>

#include "ladon/dtype.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/host_context.h"
#include "support/rope_support.h"

namespace ladon {
namespace {

using test::host_context;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kTwoPi = 2 * std::numbers::pi;

void expect_frequencies(const RopeScalingOptions& scaling, const std::vector<double>& expected) {
  const auto rotary_dim = static_cast<std::int64_t>(2 * expected.size());
  const std::vector<double> frequencies = rope_frequencies(rotary_dim, 10000, scaling);
  ASSERT_EQ(frequencies.size(), expected.size());
  for (std::size_t n = 0; n < expected.size(); ++n) {
    EXPECT_NEAR(frequencies[n], expected[n], 1e-14 * expected[n]) << "pair " << n;
  }
}

TEST(RopeFrequencies, Plain) {
  expect_frequencies({}, {1, 0.1, 0.01, 0.001});
  expect_frequencies({}, {1});
  expect_frequencies({}, {1, 0.01});
  // A factor that the kind does not read changes nothing.
  expect_frequencies({.factor = 8}, {1, 0.1, 0.01, 0.001});
}

TEST(RopeFrequencies, LinearDividesAll) {
  expect_frequencies({.kind = RopeScaling::kLinear, .factor = 4}, {0.25, 0.025, 0.0025, 0.00025});
  expect_frequencies({.kind = RopeScaling::kLinear, .factor = 0.5}, {2, 0.2, 0.02, 0.002});
}

TEST(RopeFrequencies, Llama3KeepsBlendsAndStretches) {
  // Wavelengths: 2 pi, 20 pi, 200 pi, 2000 pi. Below 125 pi kept, above 500 pi stretched; the
  // third is kept to (500 / 200 - 1) / (4 - 1) = 1/2: 0.01 * (0.5 + 0.5 / 8).
  expect_frequencies({.kind = RopeScaling::kLlama3,
                      .factor = 8,
                      .original_context = 250 * kTwoPi,
                      .low_frequency_factor = 1,
                      .high_frequency_factor = 4},
                     {1, 0.1, 0.005625, 0.000125});
}

TEST(RopeFrequencies, Llama31OfMeta) {
  // Pairs 28 and 35 are just outside the blend, 29 and 34 just inside.
  const RopeScalingOptions scaling{
      .kind = RopeScaling::kLlama3, .factor = 8, .original_context = 8192};
  const std::vector<double> frequencies = rope_frequencies(128, 500000, scaling);
  ASSERT_EQ(frequencies.size(), 64U);
  EXPECT_EQ(frequencies[0], 1);
  EXPECT_NEAR(frequencies[28], 0.0032114459947525910, 1e-16);
  EXPECT_NEAR(frequencies[29], 0.0021665707635033586, 1e-16);
  EXPECT_NEAR(frequencies[34], 0.00017850781276799642, 1e-17);
  EXPECT_NEAR(frequencies[35], 0.000095562123539646830, 1e-18);
  EXPECT_NEAR(frequencies[63], 3.0689259889145111e-7, 1e-20);
}

RopeScalingOptions yarn(double turns_of_pair_0, double beta_fast, double beta_slow, bool truncate) {
  return {.kind = RopeScaling::kYarn,
          .factor = 4,
          .original_context = kTwoPi * turns_of_pair_0,
          .beta_fast = beta_fast,
          .beta_slow = beta_slow,
          .truncate = truncate};
}

TEST(RopeFrequencies, YarnBlendsBetweenRoundedEnds) {
  // low = floor(log10(1000 / 50)) = floor(1.301) = 1, high = ceil(log10(1000 / 2)) = ceil(2.699)
  // = 3, so that pair 2 is half stretched: 0.01 * (0.5 + 0.5 / 4).
  expect_frequencies(yarn(1000, 50, 2, true), {1, 0.1, 0.00625, 0.00025});
}

TEST(RopeFrequencies, YarnBlendsBetweenRealEnds) {
  // Stretched share of pair 2: (2 - log10(20)) / (log10(800) - log10(20)) = 0.436294525872677.
  expect_frequencies(yarn(1000, 50, 1.25, false), {1, 0.1, 0.00672779105595492050, 0.00025});
}

TEST(RopeFrequencies, YarnEndsAreBounded) {
  // Above: low = floor(log10(200)) = 2, high = ceil(log10(2e8)) = 9, bounded by rotary_dim - 1 = 7;
  // pair 3 is stretched to 1/5.
  expect_frequencies(yarn(1e9, 5e6, 5, true), {1, 0.1, 0.01, 0.00085});
  // Below: low = floor(log10(0.2)) = -1, bounded by 0, high = ceil(log10(200)) = 3; pairs 1 and 2
  // are stretched to 1/3 and 2/3.
  expect_frequencies(yarn(10, 50, 0.05, true), {1, 0.075, 0.005, 0.00025});
  // All pairs rotate more than beta_fast times: none is stretched.
  expect_frequencies(yarn(1e12, 50, 2, true), {1, 0.1, 0.01, 0.001});
  // None does as much as beta_slow: both ends fall on pair 0, the rest is stretched.
  expect_frequencies(yarn(1e-3, 50, 2, true), {1, 0.025, 0.0025, 0.00025});
}

TEST(RopeFrequencies, YarnWithOneEndIsAStep) {
  // Both ends at log10(1000 / 30) = 1.523.
  expect_frequencies(yarn(1000, 30, 30, false), {1, 0.1, 0.0025, 0.00025});
}

TEST(RopeFrequencies, YarnOfDeepSeek) {
  // low = floor(10.472) = 10, high = ceil(22.513) = 23: pair 16 is stretched to 6/13, and
  // 0.01 * (7/13 + 6/13 / 40) = 0.0055.
  const RopeScalingOptions scaling{
      .kind = RopeScaling::kYarn, .factor = 40, .original_context = 4096};
  const std::vector<double> frequencies = rope_frequencies(64, 10000, scaling);
  ASSERT_EQ(frequencies.size(), 32U);
  EXPECT_NEAR(frequencies[10], std::pow(10.0, -1.25), 1e-16);        // still whole
  EXPECT_LT(frequencies[11], std::pow(10.0, -1.375) * 0.95);         // no more
  EXPECT_NEAR(frequencies[16], 0.0055, 1e-17);                       //
  EXPECT_GT(frequencies[22], std::pow(10.0, -2.75) / 40 * 1.05);     // not yet
  EXPECT_NEAR(frequencies[23], std::pow(10.0, -2.875) / 40, 1e-18);  // all the way
  EXPECT_NEAR(frequencies[31], std::pow(10.0, -3.875) / 40, 1e-18);
}

TEST(RopeFrequencies, DynamicStretchesTheBase) {
  RopeScalingOptions scaling{.kind = RopeScaling::kDynamic, .factor = 2, .original_context = 100};
  EXPECT_EQ(rope_frequencies(4, 100, scaling), rope_frequencies(4, 100, {}));
  scaling.context = 80;
  EXPECT_EQ(rope_frequencies(4, 100, scaling), rope_frequencies(4, 100, {}));
  // 2 * 250 / 100 - 1 = 4, to the power of 4 / 2: a base of 1600, whose second pair has 1 / 40.
  scaling.context = 250;
  EXPECT_DOUBLE_EQ(rope_frequencies(4, 100, scaling)[1], 1.0 / 40);
  EXPECT_EQ(rope_magnitude(scaling), 1);
}

TEST(RopeFrequencies, LongRopeDividesByOneOfTwoLists) {
  RopeScalingOptions scaling{.kind = RopeScaling::kLongRope,
                             .factor = 16,
                             .original_context = 4,
                             .short_factors = {1, 2},
                             .long_factors = {4, 5}};
  EXPECT_EQ(rope_frequencies(4, 100, scaling), (std::vector<double>{1, 0.05}));
  scaling.context = 4;
  EXPECT_EQ(rope_frequencies(4, 100, scaling), (std::vector<double>{1, 0.05}));
  scaling.context = 5;
  EXPECT_EQ(rope_frequencies(4, 100, scaling), (std::vector<double>{0.25, 0.02}));
  // sqrt(1 + ln 16 / ln 4)
  EXPECT_DOUBLE_EQ(rope_magnitude(scaling), std::sqrt(3.0));
  scaling.attention_factor = 1.5;
  EXPECT_EQ(rope_magnitude(scaling), 1.5);
  scaling.attention_factor.reset();
  scaling.factor = 1;
  EXPECT_EQ(rope_magnitude(scaling), 1);
}

TEST(RopeFrequencies, PositionsPastTheirLengthAreRefused) {
  for (const std::int64_t context : {0, 9}) {
    const RopeOptions options{
        .scaling = {
            .kind = RopeScaling::kDynamic, .factor = 2, .original_context = 6, .context = context}};
    const std::int64_t limit = context == 0 ? 6 : 9;
    const std::string expected =
        ", expected less than " + std::to_string(limit) +
        ": dynamic and longrope frequencies are chosen for one length of sequences "
        "(rope.scaling.context; rope_context when a model is loaded)";
    Tensor x(DType::kF32, {1, 6, 1, 4});
    const std::int64_t first = limit - 5;
    EXPECT_NO_THROW(rope(host_context(), x, options, {.first = first - 1}, x));
    expect_error([&] { rope(host_context(), x, options, {.first = first}, x); },
                 "rope: positions: got position " + std::to_string(limit) + expected);
    const std::vector<std::int64_t> list{0, 3, limit + 1, 2, 1, 0};
    expect_error([&] { rope(host_context(), x, options, {.explicit_positions = list}, x); },
                 "rope: positions: got position " + std::to_string(limit + 1) + expected);
    Tensor cos(DType::kF32, {limit + 1, 2});
    Tensor sin(DType::kF32, {limit + 1, 2});
    expect_error([&] { make_rope_table(host_context(), options, 4, cos, sin); },
                 "make_rope_table: positions: got position " + std::to_string(limit) + expected);
  }
}

TEST(RopeMagnitude, IsOneButForYarn) {
  EXPECT_EQ(rope_magnitude(RopeScalingOptions{}), 1);
  EXPECT_EQ(rope_magnitude({.kind = RopeScaling::kLinear, .factor = 40}), 1);
  EXPECT_EQ(rope_magnitude({.kind = RopeScaling::kLlama3, .factor = 40}), 1);
}

TEST(RopeMagnitude, OfYarn) {
  RopeScalingOptions scaling{.kind = RopeScaling::kYarn, .factor = 40};
  EXPECT_NEAR(rope_magnitude(scaling), 1.3688879454113937, 1e-15);  // 0.1 ln(40) + 1
  scaling.mscale = 0.5;                                             // alone it does not count
  EXPECT_NEAR(rope_magnitude(scaling), 1.3688879454113937, 1e-15);
  scaling.mscale = 0;
  scaling.mscale_all_dim = 0.5;  // nor does the other
  EXPECT_NEAR(rope_magnitude(scaling), 1.3688879454113937, 1e-15);
  scaling.mscale = 1;
  EXPECT_NEAR(rope_magnitude(scaling), 1.1557219901962609, 1e-15);
  scaling.mscale_all_dim = 1;  // DeepSeek: equal ones cancel
  EXPECT_EQ(rope_magnitude(scaling), 1);
  scaling.attention_factor = 0.75;  // wins over all
  EXPECT_EQ(rope_magnitude(scaling), 0.75);
  EXPECT_EQ(rope_magnitude({.kind = RopeScaling::kYarn, .factor = 1}), 1);
  EXPECT_EQ(rope_magnitude({.kind = RopeScaling::kYarn, .factor = 0.5}), 1);
}

TEST(YarnMscale, Formula) {
  EXPECT_EQ(yarn_mscale(1, 1), 1);
  EXPECT_EQ(yarn_mscale(0.25, 7), 1);
  EXPECT_NEAR(yarn_mscale(40, 0.707), 1.2608037774058553, 1e-15);
  EXPECT_EQ(yarn_mscale(40, 0), 1);
}

TEST(MakeRopeTable, HoldsCosinesAndSinesOfEachPosition) {
  constexpr std::int64_t kRows = 5;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    Tensor cos(dtype, {kRows, 2});
    Tensor sin(DType::kF64, {kRows, 2});
    make_rope_table(host_context(), {.base = 4}, 4, cos, sin);  // frequencies 1 and 1/2
    const Tensor cos_wide = Tensor::copy_of(host_context(), cos, DType::kF64);
    for (std::int64_t p = 0; p < kRows; ++p) {
      const auto position = static_cast<double>(p);
      const double* row = cos_wide.data_as<double>() + 2 * p;
      EXPECT_NEAR(row[0], std::cos(position), epsilon_of(dtype));
      EXPECT_NEAR(row[1], std::cos(position / 2), epsilon_of(dtype));
      EXPECT_NEAR(sin.data_as<double>()[2 * p], std::sin(position), 1e-15);
      EXPECT_NEAR(sin.data_as<double>()[2 * p + 1], std::sin(position / 2), 1e-15);
    }
  }
}

TEST(MakeRopeTable, TakesStridesScalingAndNoRows) {
  // Cosines and sines side by side in one array, as complex tables are.
  Tensor both(DType::kF64, {3, 1, 2});
  const TensorView cos = both.view().select(2, 0);
  const TensorView sin = both.view().select(2, 1);
  make_rope_table(
      host_context(),
      {.rotary_dim = 2, .scaling = {.kind = RopeScaling::kYarn, .attention_factor = 2.0}}, 2, cos,
      sin);
  for (int p = 0; p < 3; ++p) {
    EXPECT_NEAR(both.data_as<double>()[2 * p], 2 * std::cos(p), 1e-15);
    EXPECT_NEAR(both.data_as<double>()[2 * p + 1], 2 * std::sin(p), 1e-15);
  }
  make_rope_table(host_context(), {.frequencies = {0.25}, .magnitude = 3}, 2, cos, sin);
  for (int p = 0; p < 3; ++p) {
    EXPECT_NEAR(both.data_as<double>()[2 * p], 3 * std::cos(0.25 * p), 1e-15);
    EXPECT_NEAR(both.data_as<double>()[2 * p + 1], 3 * std::sin(0.25 * p), 1e-15);
  }
  make_rope_table(host_context(), {}, 6, TensorView(nullptr, DType::kF32, {0, 3}),
                  TensorView(nullptr, DType::kF32, {0, 3}));
}

// ---- Refusals
// ------------------------------------------------------------------------------------

TEST(RopeFrequenciesErrors, RotaryDimAndBase) {
  const auto expect = [](std::int64_t rotary_dim, double base, const std::string& what) {
    expect_error([&] { rope_frequencies(rotary_dim, base, {}); }, "rope_frequencies: " + what);
  };
  expect(0, 10000, "rotary_dim: got 0, expected a positive even number");
  expect(7, 10000, "rotary_dim: got 7, expected a positive even number");
  expect(-4, 10000, "rotary_dim: got -4, expected a positive even number");
  expect(4, -1, "base: got -1, expected a positive finite number");
  expect(4, kInfinity, "base: got inf, expected a positive finite number");
  expect(4, 1e-300, "base: got 1e-300 with scaling.factor 1, expected angles that are finite");
  expect_error([] { rope_frequencies(std::int64_t{1} << 62, 10000, {}); },
               "rope_frequencies: rotary_dim: got 4611686018427387904, expected a size that "
               "fits the memory",
               ErrorCode::kOutOfMemory);
}

TEST(RopeFrequenciesErrors, Scaling) {
  const auto expect = [](const RopeScalingOptions& scaling, const std::string& what) {
    expect_error([&] { rope_frequencies(4, 10000, scaling); }, "rope_frequencies: " + what);
    expect_error([&] { rope_magnitude(scaling); }, "rope_magnitude: " + what);
  };
  const auto positive = [](const std::string& name, const std::string& got) {
    return "scaling." + name + ": got " + got + ", expected a positive finite number";
  };
  const auto linear = RopeScaling::kLinear;
  const auto llama3 = RopeScaling::kLlama3;
  const auto yarn_kind = RopeScaling::kYarn;
  expect({.kind = static_cast<RopeScaling>(7)}, "scaling.kind: got 7, expected a RopeScaling");
  expect({.kind = linear, .factor = 0}, positive("factor", "0"));
  expect({.kind = linear, .factor = kNaN}, positive("factor", "nan"));
  for (const RopeScaling kind : {llama3, yarn_kind}) {
    expect({.kind = kind, .factor = -2}, positive("factor", "-2"));
    expect({.kind = kind, .original_context = 0}, positive("original_context", "0"));
    expect({.kind = kind, .original_context = kInfinity}, positive("original_context", "inf"));
  }
  expect({.kind = llama3, .low_frequency_factor = 0}, positive("low_frequency_factor", "0"));
  expect({.kind = llama3, .high_frequency_factor = kInfinity},
         positive("high_frequency_factor", "inf"));
  expect({.kind = llama3, .low_frequency_factor = 4},
         "scaling.high_frequency_factor: got 4, expected more than low_frequency_factor, which is "
         "4");
  expect({.kind = yarn_kind, .beta_fast = kNaN}, positive("beta_fast", "nan"));
  expect({.kind = yarn_kind, .beta_slow = -1}, positive("beta_slow", "-1"));
  expect({.kind = yarn_kind, .beta_fast = 0.5},
         "scaling.beta_fast: got 0.5, expected at least beta_slow, which is 1");
  expect({.kind = yarn_kind, .attention_factor = 0.0}, positive("attention_factor", "0"));
  const std::string not_negative = ", expected 0 or a positive finite number";
  expect({.kind = yarn_kind, .mscale = -1}, "scaling.mscale: got -1" + not_negative);
  expect({.kind = yarn_kind, .mscale_all_dim = kInfinity},
         "scaling.mscale_all_dim: got inf" + not_negative);
  expect({.kind = yarn_kind, .factor = 1e300, .mscale = 1e308, .mscale_all_dim = 1},
         "scaling.mscale: got 1e+308, which gives the magnitude inf, expected a finite one");
}

TEST(RopeFrequenciesErrors, ScalingByLength) {
  const auto expect = [](const RopeScalingOptions& scaling, const std::string& what) {
    expect_error([&] { rope_frequencies(4, 10000, scaling); }, "rope_frequencies: scaling." + what);
  };
  for (const RopeScaling kind : {RopeScaling::kDynamic, RopeScaling::kLongRope}) {
    expect({.kind = kind, .factor = 0}, "factor: got 0, expected a positive finite number");
    expect({.kind = kind, .original_context = 1},
           "original_context: got 1, expected a finite number above 1");
    expect({.kind = kind, .context = -1}, "context: got -1, expected 0 or a number of tokens");
  }
  expect({.kind = RopeScaling::kDynamic, .factor = 0.5},
         "factor: got 0.5, expected 1 or more for dynamic scaling");
  const auto longrope = RopeScaling::kLongRope;
  expect({.kind = longrope, .short_factors = {1, 0}},
         "short_factors: got 0, expected a positive finite number");
  expect({.kind = longrope, .short_factors = {1, 1}, .long_factors = {1, kNaN}},
         "long_factors: got nan, expected a positive finite number");
  expect({.kind = longrope, .short_factors = {1, 1, 1}, .long_factors = {1, 1}},
         "short_factors: got 3 of them, expected one for each of 2 pairs");
  expect({.kind = longrope, .short_factors = {1, 1}},
         "long_factors: got 0 of them, expected one for each of 2 pairs");
  expect_error([] { rope_frequencies(2, 10000, {.kind = RopeScaling::kDynamic, .context = 9000}); },
               "rope_frequencies: rotary_dim: got 2, expected more than 2 for dynamic scaling");
}

TEST(RopeFrequenciesErrors, ScalingAndBase) {
  expect_error([] { rope_frequencies(4, 1, {.kind = RopeScaling::kYarn}); },
               "rope_frequencies: base: got 1, expected more than 1 for YaRN scaling");
  expect_error(
      [] { rope_frequencies(4, 10000, {.kind = RopeScaling::kLinear, .factor = 1e-300}); },
      "rope_frequencies: base: got 10000 with scaling.factor 1e-300, expected angles that are "
      "finite");
}

TEST(MakeRopeTableErrors, All) {
  Tensor cos(DType::kF32, {5, 2});
  Tensor sin(DType::kF32, {5, 2});
  const auto expect = [&](const RopeOptions& options, std::int64_t rotary_dim,
                          const TensorView& cos_view, const TensorView& sin_view,
                          const std::string& what, ErrorCode code = ErrorCode::kInvalidArgument) {
    expect_error([&] { make_rope_table(host_context(), options, rotary_dim, cos_view, sin_view); },
                 "make_rope_table: " + what, code);
  };
  expect({}, 3, cos, sin, "rotary_dim: got 3, expected a positive even number");
  expect({.rotary_dim = 2}, 4, cos, sin,
         "options.rotary_dim: got 2, expected 0 or rotary_dim, which is 4");
  expect({.base = 0}, 4, cos, sin, "base: got 0, expected a positive finite number");
  expect({.frequencies = {1}}, 4, cos, sin,
         "frequencies: got 1 of them, expected 2, one for each pair of rotary_dim 4");
  expect({}, 6, cos, sin, "cos: got [5, 2], expected [5, 3]");
  expect({}, 4, {}, sin, "cos: got none, expected a tensor");
  expect({}, 4, cos, {}, "sin: got none, expected a tensor");
  expect({}, 4, cos.view().reshape({10}), sin, "cos: got [10], expected 2 dimensions");
  expect({}, 4, cos, cos.view().reshape({10, 1}), "sin: got [10, 1], expected [5, 2]");
  expect({}, 4, cos, sin.view().slice(0, 0, 4), "sin: got [4, 2], expected [5, 2]");
  expect({}, 4, cos, cos, "cos: got memory that overlaps sin, expected separate memory");
  expect(
      {}, 4, TensorView(cos.data(), DType::kF32, {5, 2}, {0, 1}), sin,
      "cos: got strides [0, 1] that reach one element twice, expected an output without overlap");
  expect({}, 4, TensorView(nullptr, DType::kF32, {5, 2}), sin,
         "cos: got a null pointer, expected data");
  expect({}, 4, cos, TensorView(sin.data(), DType::kBool, {5, 2}),
         "sin: got dtype bool, expected f64, f32, f16 or bf16");
  expect({}, 4, cos, TensorView(sin.data(), DType::kF32, {5, 2}, Device::kCuda),
         "sin: got memory of cuda:0, expected memory of cpu, where the call runs");
  for (const double value : values_of(cos)) EXPECT_EQ(value, 0);
  for (const double value : values_of(sin)) EXPECT_EQ(value, 0);
}

}  // namespace
}  // namespace ladon
