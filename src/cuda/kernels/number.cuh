// One element of any dtype, integers and bool included, as a number that loses nothing: for copies
// between dtypes. The rules are those of copy(): round to nearest even; to integers also the
// nearest that fits, and 0 for NaN; to bool whether it is not zero.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>

#include "cuda/kernels/element.cuh"

namespace ladon::cuda {

/// A double holds the floats and bool, 64 bits hold the integers.
struct Number {
  enum class Kind : std::uint8_t { kReal, kSigned, kUnsigned };
  Kind kind;
  union {
    double real;
    std::int64_t signed_integer;
    std::uint64_t unsigned_integer;
  };
};

__device__ inline Number real_number(double value) {
  Number number;
  number.kind = Number::Kind::kReal;
  number.real = value;
  return number;
}
__device__ inline Number integer_number(std::int64_t value) {
  Number number;
  number.kind = Number::Kind::kSigned;
  number.signed_integer = value;
  return number;
}
__device__ inline Number unsigned_number(std::uint64_t value) {
  Number number;
  number.kind = Number::Kind::kUnsigned;
  number.unsigned_integer = value;
  return number;
}

__device__ inline Number load_number(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3: return real_number(load_stored_element<double>(data, dtype, index));
    case DType::kBool: return real_number(static_cast<const std::uint8_t*>(data)[index] != 0);
    case DType::kI8: return integer_number(static_cast<const std::int8_t*>(data)[index]);
    case DType::kU8: return integer_number(static_cast<const std::uint8_t*>(data)[index]);
    case DType::kI16: return integer_number(static_cast<const std::int16_t*>(data)[index]);
    case DType::kU16: return integer_number(static_cast<const std::uint16_t*>(data)[index]);
    case DType::kI32: return integer_number(static_cast<const std::int32_t*>(data)[index]);
    case DType::kU32: return integer_number(static_cast<const std::uint32_t*>(data)[index]);
    case DType::kI64: return integer_number(static_cast<const std::int64_t*>(data)[index]);
    case DType::kU64: return unsigned_number(static_cast<const std::uint64_t*>(data)[index]);
  }
  return real_number(0);
}

template <class To>
__device__ inline To nearest_integer(double value) {
  using Limits = std::numeric_limits<To>;
  if (isnan(value)) return 0;
  const double rounded = rint(value);
  if (rounded <= static_cast<double>(Limits::min())) return Limits::min();
  // The largest 64-bit integers are not doubles and round up to powers of two: hence ">=".
  if (rounded >= static_cast<double>(Limits::max())) return Limits::max();
  return static_cast<To>(rounded);
}

template <class To, class From>
__device__ inline To nearest_integer_of(From value) {
  if (std::in_range<To>(value)) return static_cast<To>(value);
  return std::cmp_less(value, 0) ? std::numeric_limits<To>::min() : std::numeric_limits<To>::max();
}

template <class To>
__device__ inline To to_integer(const Number& number) {
  switch (number.kind) {
    case Number::Kind::kReal: return nearest_integer<To>(number.real);
    case Number::Kind::kSigned: return nearest_integer_of<To>(number.signed_integer);
    case Number::Kind::kUnsigned: return nearest_integer_of<To>(number.unsigned_integer);
  }
  return 0;
}

__device__ inline bool is_zero(const Number& number) {
  return number.kind == Number::Kind::kReal ? number.real == 0 : number.unsigned_integer == 0;
}

/// A double that rounds to 16 or 8 bits as the integer does. One of 2^53 or more takes its last
/// bits as one sticky bit, or it would be rounded twice; that bit is far below what they keep.
template <class Integer>
__device__ inline double sticky_double(Integer value) {
  constexpr Integer kLow = 0x7ff;
  const auto nearest = static_cast<double>(value);
  if (fabs(nearest) < 0x1p53 || (value & kLow) == 0) return nearest;
  return static_cast<double>((value & ~kLow) | (kLow + 1));
}

template <class Integer>
__device__ inline void store_integer(void* data, DType dtype, std::int64_t index, Integer value) {
  if (dtype == DType::kF64) {
    static_cast<double*>(data)[index] = static_cast<double>(value);
  } else if (dtype == DType::kF32) {
    static_cast<float*>(data)[index] = static_cast<float>(value);
  } else {
    store_element(data, dtype, index, sticky_double(value));
  }
}

/// A number as a float dtype.
__device__ inline void store_float(void* data, DType dtype, std::int64_t index,
                                   const Number& number) {
  switch (number.kind) {
    case Number::Kind::kReal: return store_element(data, dtype, index, number.real);
    case Number::Kind::kSigned: return store_integer(data, dtype, index, number.signed_integer);
    case Number::Kind::kUnsigned: return store_integer(data, dtype, index, number.unsigned_integer);
  }
}

__device__ inline void store_float8(void* data, std::int64_t index, const Number& number) {
  const double real = number.kind == Number::Kind::kReal ? number.real
                      : number.kind == Number::Kind::kSigned
                          ? sticky_double(number.signed_integer)
                          : sticky_double(number.unsigned_integer);
  static_cast<std::uint8_t*>(data)[index] =
      detail::float_to_float8_bits(detail::round_to_odd(real));
}

template <class To>
__device__ inline void store_as(void* data, std::int64_t index, const Number& number) {
  static_cast<To*>(data)[index] = to_integer<To>(number);
}

__device__ inline void store_number(void* data, DType dtype, std::int64_t index,
                                    const Number& number) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16: return store_float(data, dtype, index, number);
    case DType::kF8E4M3: return store_float8(data, index, number);
    case DType::kBool: static_cast<std::uint8_t*>(data)[index] = !is_zero(number); return;
    case DType::kI8: return store_as<std::int8_t>(data, index, number);
    case DType::kU8: return store_as<std::uint8_t>(data, index, number);
    case DType::kI16: return store_as<std::int16_t>(data, index, number);
    case DType::kU16: return store_as<std::uint16_t>(data, index, number);
    case DType::kI32: return store_as<std::int32_t>(data, index, number);
    case DType::kU32: return store_as<std::uint32_t>(data, index, number);
    case DType::kI64: return store_as<std::int64_t>(data, index, number);
    case DType::kU64: return store_as<std::uint64_t>(data, index, number);
  }
}

}  // namespace ladon::cuda
