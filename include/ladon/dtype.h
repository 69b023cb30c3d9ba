// Element types: the DType tag, and the value types float16, bfloat16 and float8_e4m3.
//
// Ladon computes with floats. Bool is for masks; the integers are there so that checkpoints can
// hold them and copy() can convert them, and every operation on numbers refuses them by name. So it
// does with 8-bit floats, which are for caches (KvFormat) and copy() alone.
//
// Conversions to the 16-bit types round to nearest, ties to even, straight from double (no double
// rounding through float). NaN stays NaN, overflow gives infinity, subnormals are kept. The 8-bit
// type has no infinity: overflow gives the largest number, +-448, and infinity NaN.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

#include "ladon/export.h"

namespace ladon {

enum class DType : std::uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kBool,  // one byte, zero is false
  kI8,
  kU8,
  kI16,
  kU16,
  kI32,
  kU32,
  kI64,
  kU64,
  kF8E4M3,  // 4 bits of exponent, 3 of mantissa
};

/// Bytes of one element.
constexpr std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::kF64:
    case DType::kI64:
    case DType::kU64: return 8;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32: return 4;
    case DType::kF16:
    case DType::kBF16:
    case DType::kI16:
    case DType::kU16: return 2;
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kF8E4M3: return 1;
  }
  return 0;
}

/// Whether Ladon computes with elements of this dtype.
constexpr bool is_float(DType dtype) noexcept {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 ||
         dtype == DType::kBF16;
}

/// "f64", "f32", "f16", "bf16", "bool", "i8", "u8", ... "u64", "f8e4m3".
LADON_API const char* name_of(DType dtype) noexcept;

/// The gap between 1 and the next number: 2^-52, 2^-23, 2^-10, 2^-7 or (f8e4m3) 2^-3. Zero for bool
/// and the integers.
LADON_API double epsilon_of(DType dtype) noexcept;

namespace detail {

/// double to float, rounded to odd: a later rounding to at most 22 bits is then correct, which
/// rounding to nearest twice is not.
constexpr float round_to_odd(double value) noexcept {
  const float nearest = static_cast<float>(value);
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(nearest);
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (static_cast<double>(nearest) == value || magnitude > 0x7f800000U) return nearest;
  const double wide = static_cast<double>(nearest);
  // By the sign bit: a tiny negative number rounds to -0, which is not below 0.
  const bool too_large = bits > 0x7fffffffU ? wide < value : wide > value;
  const std::uint32_t truncated = too_large ? bits - 1 : bits;
  return std::bit_cast<float>(truncated | 1U);
}

constexpr std::uint16_t float_to_bfloat16_bits(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffU) > 0x7f800000U) {
    return static_cast<std::uint16_t>((bits >> 16) | 0x0040U);  // quiet, so the payload survives
  }
  return static_cast<std::uint16_t>((bits + 0x7fffU + ((bits >> 16) & 1U)) >> 16);
}

constexpr float bfloat16_bits_to_float(std::uint16_t bits) noexcept {
  return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
}

constexpr std::uint16_t float_to_float16_bits(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 16) & 0x8000U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude > 0x7f800000U) {
    return static_cast<std::uint16_t>(sign | 0x7e00U | ((magnitude >> 13) & 0x3ffU));
  }
  if (magnitude >= 0x477ff000U) return static_cast<std::uint16_t>(sign | 0x7c00U);  // >= 65520
  if (magnitude < 0x38800000U) {  // below 2^-14: a subnormal, one unit is 2^-24
    if (magnitude < 0x33000000U) return static_cast<std::uint16_t>(sign);  // below 2^-25
    const std::uint32_t exponent = magnitude >> 23;
    const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t shift = 126U - exponent;
    const std::uint32_t half = 1U << (shift - 1U);
    const std::uint32_t odd = (mantissa >> shift) & 1U;
    return static_cast<std::uint16_t>(sign | ((mantissa + half - 1U + odd) >> shift));
  }
  const std::uint32_t odd = (magnitude >> 13) & 1U;
  return static_cast<std::uint16_t>(sign | ((magnitude - 0x38000000U + 0xfffU + odd) >> 13));
}

constexpr float float16_bits_to_float(std::uint16_t half) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000U) << 16;
  const std::uint32_t magnitude = half & 0x7fffU;
  if (magnitude >= 0x7c00U) return std::bit_cast<float>(sign | 0x7f800000U | (magnitude << 13));
  if (magnitude >= 0x0400U) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000U));
  const float value = static_cast<float>(magnitude) * 0x1p-24F;
  return sign != 0 ? -value : value;
}

/// e4m3 as the Open Compute Project defines it: exponent bias 7, subnormals, no infinities, NaN in
/// all ones alone.
constexpr std::uint8_t float_to_float8_bits(float value) noexcept {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7fffffffU;
  if (magnitude >= 0x7f800000U) return static_cast<std::uint8_t>(sign | 0x7fU);
  if (magnitude >= 0x43e00000U) return static_cast<std::uint8_t>(sign | 0x7eU);  // >= 448
  if (magnitude < 0x3c800000U) {  // below 2^-6: a subnormal, one unit is 2^-9
    if (magnitude < 0x3a800000U) return static_cast<std::uint8_t>(sign);  // below 2^-10
    const std::uint32_t mantissa = (magnitude & 0x7fffffU) | 0x800000U;
    const std::uint32_t shift = 141U - (magnitude >> 23);
    const std::uint32_t half = 1U << (shift - 1U);
    const std::uint32_t odd = (mantissa >> shift) & 1U;
    return static_cast<std::uint8_t>(sign | ((mantissa + half - 1U + odd) >> shift));
  }
  const std::uint32_t odd = (magnitude >> 20) & 1U;
  return static_cast<std::uint8_t>(sign | ((magnitude - 0x3c000000U + 0x7ffffU + odd) >> 20));
}

constexpr float float8_bits_to_float(std::uint8_t bits) noexcept {
  const std::uint32_t sign = static_cast<std::uint32_t>(bits & 0x80U) << 24;
  const std::uint32_t magnitude = bits & 0x7fU;
  if (magnitude == 0x7fU) return std::bit_cast<float>(sign | 0x7fc00000U);
  if (magnitude >= 8) return std::bit_cast<float>(sign | ((magnitude << 20) + 0x3c000000U));
  const float value = static_cast<float>(magnitude) * 0x1p-9F;
  return sign != 0 ? -value : value;
}

}  // namespace detail

/// The upper half of a float: 8 bits of exponent, 7 of mantissa.
struct bfloat16 {
  std::uint16_t bits = 0;

  constexpr bfloat16() = default;
  constexpr explicit bfloat16(float value) noexcept : bits(detail::float_to_bfloat16_bits(value)) {}
  constexpr explicit bfloat16(double value) noexcept
      : bits(detail::float_to_bfloat16_bits(detail::round_to_odd(value))) {}
  constexpr operator float() const noexcept { return detail::bfloat16_bits_to_float(bits); }
};

/// IEEE 754 binary16: 5 bits of exponent, 10 of mantissa.
struct float16 {
  std::uint16_t bits = 0;

  constexpr float16() = default;
  constexpr explicit float16(float value) noexcept : bits(detail::float_to_float16_bits(value)) {}
  constexpr explicit float16(double value) noexcept
      : bits(detail::float_to_float16_bits(detail::round_to_odd(value))) {}
  constexpr operator float() const noexcept { return detail::float16_bits_to_float(bits); }
};

/// OCP's E4M3: 4 bits of exponent, 3 of mantissa, from 2^-9 to 448.
struct float8_e4m3 {
  std::uint8_t bits = 0;

  constexpr float8_e4m3() = default;
  constexpr explicit float8_e4m3(float value) noexcept
      : bits(detail::float_to_float8_bits(value)) {}
  constexpr explicit float8_e4m3(double value) noexcept
      : bits(detail::float_to_float8_bits(detail::round_to_odd(value))) {}
  constexpr operator float() const noexcept { return detail::float8_bits_to_float(bits); }
};

/// The DType of a C++ element type.
template <class T>
struct dtype_of_type;
template <>
struct dtype_of_type<double> {
  static constexpr DType value = DType::kF64;
};
template <>
struct dtype_of_type<float> {
  static constexpr DType value = DType::kF32;
};
template <>
struct dtype_of_type<float16> {
  static constexpr DType value = DType::kF16;
};
template <>
struct dtype_of_type<bfloat16> {
  static constexpr DType value = DType::kBF16;
};
template <>
struct dtype_of_type<bool> {
  static constexpr DType value = DType::kBool;
};
template <>
struct dtype_of_type<std::int8_t> {
  static constexpr DType value = DType::kI8;
};
template <>
struct dtype_of_type<std::uint8_t> {
  static constexpr DType value = DType::kU8;
};
template <>
struct dtype_of_type<std::int16_t> {
  static constexpr DType value = DType::kI16;
};
template <>
struct dtype_of_type<std::uint16_t> {
  static constexpr DType value = DType::kU16;
};
template <>
struct dtype_of_type<std::int32_t> {
  static constexpr DType value = DType::kI32;
};
template <>
struct dtype_of_type<std::uint32_t> {
  static constexpr DType value = DType::kU32;
};
template <>
struct dtype_of_type<std::int64_t> {
  static constexpr DType value = DType::kI64;
};
template <>
struct dtype_of_type<std::uint64_t> {
  static constexpr DType value = DType::kU64;
};
template <>
struct dtype_of_type<float8_e4m3> {
  static constexpr DType value = DType::kF8E4M3;
};

template <class T>
inline constexpr DType dtype_of = dtype_of_type<T>::value;

}  // namespace ladon
