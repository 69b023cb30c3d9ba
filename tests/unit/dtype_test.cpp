// The 16-bit types against an independent, slow and exact rounding: a search for the nearest among
// all representable values.
#include "ladon/dtype.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "ladon/random.h"
#include "ladon/version.h"

namespace ladon {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr float kFloatInfinity = std::numeric_limits<float>::infinity();

/// A 16-bit float format, decoded from its definition and not by the code under test.
struct Format {
  int exponent_bits;
  int mantissa_bits;

  int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  std::uint16_t infinity() const {
    return static_cast<std::uint16_t>(((1 << exponent_bits) - 1) << mantissa_bits);
  }
  double decode(std::uint16_t bits) const {
    const int mantissa = bits & ((1 << mantissa_bits) - 1);
    const int exponent = (bits & 0x7fff) >> mantissa_bits;
    const double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias() - mantissa_bits);
    return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias() - mantissa_bits);
  }

  /// Round to nearest, ties to even. Candidates are compared by their distances, which are exact in
  /// double because a neighbour is never more than a factor of two away (or is zero).
  std::uint16_t round(double value) const {
    const std::uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const double magnitude = std::fabs(value);
    std::uint16_t below = 0;
    std::uint16_t above = infinity();
    if (std::isinf(value)) return static_cast<std::uint16_t>(sign | above);
    while (above - below > 1) {
      const auto middle = static_cast<std::uint16_t>((above + below) / 2);
      (decode(middle) <= magnitude ? below : above) = middle;
    }
    // What would follow the largest number stands in for infinity: IEEE 754 rounds as if it were
    // there.
    const double lower = decode(below);
    const double upper = decode(above);
    const double to_lower = magnitude - lower;
    const double to_upper = upper - magnitude;
    const bool up = to_upper < to_lower || (to_upper == to_lower && (below & 1) != 0);
    return static_cast<std::uint16_t>(sign | (up ? above : below));
  }
};

constexpr Format kHalf{5, 10};
constexpr Format kBrain{8, 7};

TEST(DType, NamesSizesAndEpsilons) {
  EXPECT_STREQ(name_of(DType::kF64), "f64");
  EXPECT_STREQ(name_of(DType::kF32), "f32");
  EXPECT_STREQ(name_of(DType::kF16), "f16");
  EXPECT_STREQ(name_of(DType::kBF16), "bf16");
  EXPECT_STREQ(name_of(DType::kBool), "bool");
  EXPECT_STREQ(name_of(static_cast<DType>(99)), "unknown");
  EXPECT_EQ(epsilon_of(DType::kF64), std::numeric_limits<double>::epsilon());
  EXPECT_EQ(epsilon_of(DType::kF32), static_cast<double>(std::numeric_limits<float>::epsilon()));
  EXPECT_EQ(epsilon_of(DType::kF16), kHalf.decode(0x3c01) - 1);
  EXPECT_EQ(epsilon_of(DType::kBF16), kBrain.decode(0x3f81) - 1);
  EXPECT_EQ(epsilon_of(DType::kBool), 0);
  EXPECT_EQ(epsilon_of(static_cast<DType>(99)), 0);
  EXPECT_EQ(size_of(DType::kF64), sizeof(double));
  EXPECT_EQ(size_of(DType::kF16), sizeof(float16));
  EXPECT_EQ(size_of(DType::kBF16), sizeof(bfloat16));
  EXPECT_EQ(size_of(DType::kBool), 1U);
  EXPECT_TRUE(is_float(DType::kBF16));
  EXPECT_FALSE(is_float(DType::kBool));
  EXPECT_EQ(dtype_of<float16>, DType::kF16);
}

TEST(DType, VersionIsThatOfTheHeader) {
  EXPECT_EQ(version(), std::to_string(LADON_VERSION_MAJOR) + "." +
                           std::to_string(LADON_VERSION_MINOR) + "." +
                           std::to_string(LADON_VERSION_PATCH));
}

template <class T>
void check_every_value(const Format& format) {
  for (int i = 0; i < 65536; ++i) {
    T value;
    value.bits = static_cast<std::uint16_t>(i);
    const float wide = value;
    if ((i & 0x7fff) > format.infinity()) {
      const int quiet = i | (1 << (format.mantissa_bits - 1));  // payload and sign are kept
      ASSERT_TRUE(std::isnan(wide)) << i;
      ASSERT_EQ(T(wide).bits, quiet) << i;
      ASSERT_EQ(T(static_cast<double>(wide)).bits, quiet) << i;
      continue;
    }
    if ((i & 0x7fff) == format.infinity()) {
      ASSERT_EQ(wide, (i & 0x8000) != 0 ? -kFloatInfinity : kFloatInfinity);
    } else {
      ASSERT_EQ(static_cast<double>(wide), format.decode(value.bits)) << i;
    }
    ASSERT_EQ(std::signbit(wide), (i & 0x8000) != 0) << i;
    ASSERT_EQ(T(wide).bits, i);
    ASSERT_EQ(T(static_cast<double>(wide)).bits, i);
  }
}

TEST(DType, EveryHalfGoesThroughFloatAndDouble) { check_every_value<float16>(kHalf); }
TEST(DType, EveryBfloat16GoesThroughFloatAndDouble) { check_every_value<bfloat16>(kBrain); }

template <class T>
void check_rounding(const Format& format, double value) {
  for (const double signed_value : {value, -value}) {
    ASSERT_EQ(T(signed_value).bits, format.round(signed_value))
        << std::hexfloat << signed_value << " as double";
    const auto narrow = static_cast<float>(signed_value);
    ASSERT_EQ(T(narrow).bits, format.round(static_cast<double>(narrow)))
        << std::hexfloat << narrow << " as float";
  }
}

/// Every number of the format, every midpoint, and the doubles and floats next to them.
template <class T>
void check_around_every_value(const Format& format) {
  for (std::uint16_t bits = 0; bits < format.infinity(); ++bits) {
    const double exact = format.decode(bits);
    const double next = format.decode(static_cast<std::uint16_t>(bits + 1));
    for (const double center : {exact, exact + (next - exact) / 2}) {
      for (const double value :
           {center, std::nextafter(center, kInfinity), std::nextafter(center, 0.0),
            static_cast<double>(std::nextafter(static_cast<float>(center), kFloatInfinity)),
            static_cast<double>(std::nextafter(static_cast<float>(center), 0.0F))}) {
        check_rounding<T>(format, value);
        if (testing::Test::HasFatalFailure()) return;
      }
    }
  }
}

TEST(DType, HalfRoundsToNearestEvenEverywhere) { check_around_every_value<float16>(kHalf); }
TEST(DType, Bfloat16RoundsToNearestEvenEverywhere) { check_around_every_value<bfloat16>(kBrain); }

TEST(DType, RandomNumbersOfAllMagnitudesRoundToNearest) {
  Random random(1);
  for (int i = 0; i < 200000; ++i) {
    const double mantissa = 1 + random.uniform();
    check_rounding<float16>(kHalf, std::ldexp(mantissa, static_cast<int>(random.below(48)) - 30));
    check_rounding<bfloat16>(kBrain,
                             std::ldexp(mantissa, static_cast<int>(random.below(300)) - 155));
    if (HasFatalFailure()) return;
  }
}

TEST(DType, HalfAtItsEdges) {
  EXPECT_EQ(float16(65504.0).bits, 0x7bff);
  EXPECT_EQ(float16(65519.99).bits, 0x7bff);
  EXPECT_EQ(float16(65520.0).bits, 0x7c00);  // the tie goes to the even one: infinity
  EXPECT_EQ(float16(65520.0F).bits, 0x7c00);
  EXPECT_EQ(float16(std::nextafter(65520.0F, 0.0F)).bits, 0x7bff);
  EXPECT_EQ(float16(-1e300).bits, 0xfc00);
  EXPECT_EQ(float16(kInfinity).bits, 0x7c00);
  EXPECT_EQ(float16(-kInfinity).bits, 0xfc00);
  EXPECT_EQ(float16(0x1p-24).bits, 0x0001);
  EXPECT_EQ(float16(0x1p-25).bits, 0x0000);  // the tie goes to zero
  EXPECT_EQ(float16(std::nextafter(0x1p-25F, 1.0F)).bits, 0x0001);
  EXPECT_EQ(float16(0x1.ffcp-15).bits, 0x0400);  // the largest subnormal rounds up to normal
  EXPECT_EQ(float16(-0.0F).bits, 0x8000);
}

/// e4m3 has one byte, no infinity, and NaN in one code alone.
double decode_float8(int bits) {
  const int exponent = bits >> 3 & 15;
  const int mantissa = bits & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (bits & 0x80) != 0 ? -magnitude : magnitude;
}

TEST(DType, EveryFloat8GoesThroughFloatAndDouble) {
  for (int i = 0; i < 256; ++i) {
    float8_e4m3 value;
    value.bits = static_cast<std::uint8_t>(i);
    const float wide = value;
    if ((i & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(wide)) << i;
    } else {
      EXPECT_EQ(static_cast<double>(wide), decode_float8(i)) << i;
    }
    EXPECT_EQ(std::signbit(wide), i >= 0x80) << i;
    EXPECT_EQ(float8_e4m3(wide).bits, i);
    EXPECT_EQ(float8_e4m3(static_cast<double>(wide)).bits, i);
  }
}

TEST(DType, Float8RoundsToNearestEvenEverywhere) {
  for (int i = 0; i < 0x7e; ++i) {
    const double lower = decode_float8(i);
    const double upper = decode_float8(i + 1);
    const double middle = (lower + upper) / 2;
    for (const auto& [value, expected] : {std::pair{middle, i % 2 == 0 ? i : i + 1},
                                          {std::nextafter(middle, 0.0), i},
                                          {std::nextafter(middle, 1e3), i + 1},
                                          {std::nextafter(upper, 0.0), i + 1}}) {
      EXPECT_EQ(float8_e4m3(value).bits, expected) << std::hexfloat << value;
      EXPECT_EQ(float8_e4m3(-value).bits, expected | 0x80) << std::hexfloat << value;
    }
    const auto narrow = static_cast<float>(middle);
    EXPECT_EQ(float8_e4m3(std::nextafter(narrow, 0.0F)).bits, i);
    EXPECT_EQ(float8_e4m3(std::nextafter(narrow, 1e3F)).bits, i + 1);
  }
}

TEST(DType, Float8AtItsEdges) {
  for (const double large : {448.0, 464.0, 465.0, 480.0, 1e6, 1e300}) {
    EXPECT_EQ(float8_e4m3(large).bits, 0x7e);
    EXPECT_EQ(float8_e4m3(-large).bits, 0xfe);
  }
  EXPECT_EQ(float8_e4m3(kInfinity).bits, 0x7f);
  EXPECT_EQ(float8_e4m3(-kFloatInfinity).bits, 0xff);
  EXPECT_EQ(float8_e4m3(std::nan("")).bits, 0x7f);
  EXPECT_EQ(float8_e4m3(0x1p-10).bits, 0x00);  // the tie goes to zero
  EXPECT_EQ(float8_e4m3(std::nextafter(0x1p-10F, 1.0F)).bits, 0x01);
  EXPECT_EQ(float8_e4m3(1e-300).bits, 0x00);
  EXPECT_EQ(float8_e4m3(-0.0).bits, 0x80);
  EXPECT_STREQ(name_of(DType::kF8E4M3), "f8e4m3");
  EXPECT_EQ(size_of(DType::kF8E4M3), sizeof(float8_e4m3));
  EXPECT_EQ(epsilon_of(DType::kF8E4M3), decode_float8(0x39) - 1);
  EXPECT_FALSE(is_float(DType::kF8E4M3));
  EXPECT_EQ(dtype_of<float8_e4m3>, DType::kF8E4M3);
  static_assert(float8_e4m3(1.0F).bits == 0x38);
}

TEST(DType, TinyDoublesBecomeZerosOfTheirSign) {
  for (const double tiny : {1e-60, 1e-300, 5e-324}) {
    EXPECT_EQ(float16(tiny).bits, 0x0000);
    EXPECT_EQ(float16(-tiny).bits, 0x8000);
    EXPECT_EQ(bfloat16(tiny).bits, 0x0000);
    EXPECT_EQ(bfloat16(-tiny).bits, 0x8000);
  }
}

TEST(DType, DoublesAreRoundedOnce) {
  // A little above the midpoint of 1 and the next half, by less than a float can tell: through
  // float it would become the midpoint, and then 1.
  const double half_case = 1 + 0x1p-11 + 0x1p-40;
  EXPECT_EQ(float16(static_cast<float>(half_case)).bits, 0x3c00);
  EXPECT_EQ(float16(half_case).bits, 0x3c01);
  const double brain_case = 1 + 0x1p-8 + 0x1p-40;
  EXPECT_EQ(bfloat16(static_cast<float>(brain_case)).bits, 0x3f80);
  EXPECT_EQ(bfloat16(brain_case).bits, 0x3f81);
  // And a little below the midpoint of an odd number and the next.
  const double below = 1 + 3 * 0x1p-11 - 0x1p-40;
  EXPECT_EQ(float16(static_cast<float>(below)).bits, 0x3c02);
  EXPECT_EQ(float16(below).bits, 0x3c01);
}

TEST(DType, ConversionsAreConstantExpressions) {
  static_assert(float16(1.0F).bits == 0x3c00);
  static_assert(bfloat16(1.0).bits == 0x3f80);
  static_assert(static_cast<float>(float16(0.5)) == 0.5F);
}

}  // namespace
}  // namespace ladon
