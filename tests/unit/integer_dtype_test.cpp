// The integer dtypes: their tags, conversions between all types, and that what computes refuses
// them by name.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/attention.h"
#include "ladon/context.h"
#include "ladon/multi_head_attention.h"
#include "ladon/parameter.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

template <class T>
class IntegerDType : public testing::Test {};
using Integers = testing::Types<std::int8_t, std::uint8_t, std::int16_t, std::uint16_t,
                                std::int32_t, std::uint32_t, std::int64_t, std::uint64_t>;
TYPED_TEST_SUITE(IntegerDType, Integers);

TYPED_TEST(IntegerDType, NameSizeAndKind) {
  constexpr DType dtype = dtype_of<TypeParam>;
  std::string name(1, std::is_signed_v<TypeParam> ? 'i' : 'u');
  name += std::to_string(8 * sizeof(TypeParam));
  EXPECT_EQ(name_of(dtype), name);
  EXPECT_EQ(size_of(dtype), sizeof(TypeParam));
  EXPECT_FALSE(is_float(dtype));
  EXPECT_EQ(epsilon_of(dtype), 0);
}

TYPED_TEST(IntegerDType, FloatsRoundToEvenAndStopAtTheEnds) {
  using Limits = std::numeric_limits<TypeParam>;
  const auto converted = [](double value) {
    const Tensor wide = Tensor::from_values(DType::kF64, {1}, {value});
    const Tensor result = Tensor::copy_of(host_context(), wide, dtype_of<TypeParam>);
    TypeParam stored{};
    store_element(&stored, dtype_of<TypeParam>, 0, value);
    EXPECT_EQ(stored, *result.data_as<TypeParam>());
    return *result.data_as<TypeParam>();
  };
  EXPECT_EQ(converted(2.5), 2);
  EXPECT_EQ(converted(3.5), 4);
  EXPECT_EQ(converted(0.49), 0);
  EXPECT_EQ(converted(-0.5), 0);
  EXPECT_EQ(converted(100), 100);
  EXPECT_EQ(converted(-100), std::is_signed_v<TypeParam> ? static_cast<TypeParam>(-100) : 0);
  EXPECT_EQ(converted(std::nan("")), 0);
  EXPECT_EQ(converted(kInfinity), Limits::max());
  EXPECT_EQ(converted(-kInfinity), Limits::min());
  EXPECT_EQ(converted(1e300), Limits::max());
  EXPECT_EQ(converted(-1e300), Limits::min());
  EXPECT_EQ(converted(static_cast<double>(Limits::max())), Limits::max());
  EXPECT_EQ(converted(static_cast<double>(Limits::min())), Limits::min());
}

TYPED_TEST(IntegerDType, BetweenIntegersTheNearest) {
  using Limits = std::numeric_limits<TypeParam>;
  Tensor ends(DType::kI64, {2});
  ends.data_as<std::int64_t>()[0] = std::numeric_limits<std::int64_t>::min();
  ends.data_as<std::int64_t>()[1] = std::numeric_limits<std::int64_t>::max();
  const Tensor narrowed = Tensor::copy_of(host_context(), ends, dtype_of<TypeParam>);
  EXPECT_EQ(narrowed.data_as<TypeParam>()[0], Limits::min());
  const bool is_u64 = dtype_of<TypeParam> == DType::kU64;
  EXPECT_EQ(narrowed.data_as<TypeParam>()[1],
            is_u64 ? static_cast<TypeParam>(ends.data_as<std::int64_t>()[1]) : Limits::max());

  Tensor own(dtype_of<TypeParam>, {2});
  own.data_as<TypeParam>()[0] = Limits::min();
  own.data_as<TypeParam>()[1] = Limits::max();
  const Tensor unsigned_back = Tensor::copy_of(host_context(), own, DType::kU64);
  EXPECT_EQ(unsigned_back.data_as<std::uint64_t>()[0], 0U);
  EXPECT_EQ(unsigned_back.data_as<std::uint64_t>()[1], static_cast<std::uint64_t>(Limits::max()));
  const Tensor bools = Tensor::copy_of(host_context(), own, DType::kBool);
  EXPECT_EQ(static_cast<const std::uint8_t*>(bools.data())[0], std::is_signed_v<TypeParam>);
  EXPECT_EQ(static_cast<const std::uint8_t*>(bools.data())[1], 1);
  const Tensor from_bools = Tensor::copy_of(host_context(), bools, dtype_of<TypeParam>);
  EXPECT_EQ(from_bools.data_as<TypeParam>()[1], 1);
}

TYPED_TEST(IntegerDType, ToFloatsRoundedOnce) {
  using Limits = std::numeric_limits<TypeParam>;
  std::vector<TypeParam> values = {Limits::min(), Limits::max(), 0, 1, 77};
  const auto add = [](TypeParam value, int offset) {
    return static_cast<TypeParam>(value + static_cast<TypeParam>(offset));
  };
  for (int shift = 1; shift < Limits::digits; ++shift) {
    const auto power = static_cast<TypeParam>(TypeParam{1} << shift);
    for (int offset = -2; offset <= 2; ++offset) {
      values.push_back(add(power, offset));
      // Next to the midpoint of two bfloat16 numbers, by less than a double can tell.
      const auto half = static_cast<TypeParam>(shift >= 8 ? power >> 8 : 0);
      values.push_back(add(static_cast<TypeParam>(power + half), offset));
    }
  }
  const std::size_t positive = values.size();
  if (std::is_signed_v<TypeParam>) {
    for (std::size_t i = 2; i < positive; ++i) values.push_back(static_cast<TypeParam>(-values[i]));
  }
  const ConstTensorView from(values.data(), dtype_of<TypeParam>,
                             {static_cast<std::int64_t>(values.size())});
  const Tensor f64 = Tensor::copy_of(host_context(), from, DType::kF64);
  const Tensor f32 = Tensor::copy_of(host_context(), from, DType::kF32);
  const Tensor bf16 = Tensor::copy_of(host_context(), from, DType::kBF16);
  const Tensor f16 = Tensor::copy_of(host_context(), from, DType::kF16);
  for (std::size_t i = 0; i < values.size(); ++i) {
    // A long double holds every integer: no rounding before the comparison.
    const auto exact = static_cast<long double>(values[i]);
    EXPECT_EQ(f64.data_as<double>()[i], static_cast<double>(exact));
    EXPECT_EQ(f32.data_as<float>()[i], static_cast<float>(exact));
    const auto error = [&](std::uint16_t bits) {
      return std::fabs(static_cast<long double>(detail::bfloat16_bits_to_float(bits)) - exact);
    };
    const std::uint16_t chosen = bf16.data_as<bfloat16>()[i].bits;
    for (const int step : {-1, 1}) {
      const auto neighbour = static_cast<std::uint16_t>(chosen + step);
      if (exact == 0) continue;
      EXPECT_LE(error(chosen), error(neighbour)) << static_cast<double>(exact);
      EXPECT_TRUE(error(chosen) < error(neighbour) || (chosen & 1) == 0);
    }
    if (std::fabs(exact) <= 2048) {
      EXPECT_EQ(static_cast<long double>(static_cast<float>(f16.data_as<float16>()[i])), exact);
    } else if (std::fabs(exact) >= 65520) {
      EXPECT_TRUE(std::isinf(static_cast<float>(f16.data_as<float16>()[i])));
    }
    EXPECT_EQ(load_element(from.data(), from.dtype(), static_cast<std::int64_t>(i)),
              static_cast<double>(exact));
  }
}

TYPED_TEST(IntegerDType, WhatComputesRefusesThem) {
  constexpr DType dtype = dtype_of<TypeParam>;
  const std::string got = std::string("got dtype ") + name_of(dtype) + ", expected ";
  const std::string floats = "f64, f32, f16 or bf16";
  const Context context;
  const Tensor integers(dtype, {1, 2, 1, 4});
  const Tensor numbers(DType::kF32, {1, 2, 1, 4});
  EXPECT_EQ(error_of([&] { attention(context, integers, integers, integers); }),
            "attention: q: " + got + floats);
  EXPECT_EQ(error_of([&] { attention(context, numbers, integers, integers); }),
            "attention: k: " + got + floats);
  EXPECT_EQ(error_of([&] { attention(context, numbers, numbers, integers); }),
            "attention: v: " + got + "f32");
  AttentionOptions masked;
  const Tensor square(dtype, {1, 1, 2, 2});
  masked.mask = square;
  EXPECT_EQ(error_of([&] { attention(context, numbers, numbers, numbers, masked); }),
            "attention: mask: " + got + "bool");
  AttentionOptions biased;
  biased.bias = square;
  EXPECT_EQ(error_of([&] { attention(context, numbers, numbers, numbers, biased); }),
            "attention: bias: " + got + floats);
  Tensor rotated(DType::kF32, {1, 2, 1, 4});
  EXPECT_EQ(error_of([&] { rope(context, integers, {}, RopePositions{}, rotated); }),
            "rope: x: " + got + floats);
  Tensor target(dtype, {2});
  EXPECT_EQ(error_of([&] { fill_uniform(host_context(), target, 0, 1, 1); }),
            "fill_uniform: view: " + got + floats);
  EXPECT_EQ(error_of([&] { Parameter::zeros("w", dtype, {2}); }),
            "Parameter::zeros: dtype: got " + std::string(name_of(dtype)) + ", expected " + floats);
  EXPECT_EQ(
      error_of([&] { MultiHeadAttention({.embed_dim = 4, .num_heads = 1, .dtype = dtype}); }),
      "MultiHeadAttention: dtype: got " + std::string(name_of(dtype)) + ", expected " + floats);
}

}  // namespace
}  // namespace ladon
