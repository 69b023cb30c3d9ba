// Converts rows between float dtypes with one rounding per element, as copies and norms promise.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"

namespace ladon::cpu {
namespace {

/// Converts a double to float, rounded to odd: rounding the result to 16 bits then gives what
/// rounding the double directly would.
inline float round_to_odd(double x) {
  const float nearest = static_cast<float>(x);
  const double value = static_cast<double>(nearest);
  std::uint32_t bits = 0;
  __builtin_memcpy(&bits, &nearest, sizeof bits);
  bits -= static_cast<std::uint32_t>(__builtin_fabs(value) > __builtin_fabs(x));  // truncated
  bits |= static_cast<std::uint32_t>(value != x);
  float odd = 0;
  __builtin_memcpy(&odd, &bits, sizeof odd);
  return odd;
}

inline constexpr std::int64_t kRowChunk = 256;

/// Converts n doubles to any float dtype.
inline void store_rounded(const double* from, std::int64_t n, void* to, DType dtype) {
  switch (dtype) {
    case DType::kF64:
    case DType::kF32: return store_row(from, n, to, dtype);
    case DType::kF16:
    case DType::kBF16: {
      float chunk[kRowChunk];
      for (std::int64_t i = 0; i < n; i += kRowChunk) {
        const std::int64_t count = smaller(kRowChunk, n - i);
        for (std::int64_t j = 0; j < count; ++j) chunk[j] = round_to_odd(from[i + j]);
        store_row(chunk, count, at(to, dtype, i), dtype);
      }
      return;
    }
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kF8E4M3: return;  // not float
  }
}

/// Converts n elements of one float dtype to another.
inline void convert_row(const void* from, DType from_dtype, std::int64_t n, void* to,
                        DType to_dtype) {
  if (from_dtype == to_dtype) {
    __builtin_memcpy(to, from, static_cast<std::size_t>(n) * size_of(to_dtype));
    return;
  }
  const bool through_f64 = from_dtype == DType::kF64 || to_dtype == DType::kF64;
  for (std::int64_t i = 0; i < n; i += kRowChunk) {
    const std::int64_t count = smaller(kRowChunk, n - i);
    const void* source = at(from, from_dtype, i);
    if (through_f64) {
      double chunk[kRowChunk];
      load_row(source, from_dtype, count, chunk);
      store_rounded(chunk, count, at(to, to_dtype, i), to_dtype);
    } else {
      float chunk[kRowChunk];
      load_row(source, from_dtype, count, chunk);
      store_row(chunk, count, at(to, to_dtype, i), to_dtype);
    }
  }
}

}  // namespace
}  // namespace ladon::cpu
