// Rows in their stored type, converted to the compute type in registers as they are loaded: a cache
// or a weight of bf16, int8 or fp8 costs memory bandwidth for its own bytes only, and no copy.
#pragma once

#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/math.inl"
#include "ladon/kv_format.h"

namespace ladon::cpu {
namespace {

/// Loads elements [i, i + kLanes) of a row.
template <class V, DType kStored>
inline V load_stored(const char* row, std::int64_t i) {
  if constexpr (kStored == kDTypeOf<typename V::Scalar>) {
    return load<V>(reinterpret_cast<const typename V::Scalar*>(row) + i);
  } else if constexpr (kStored == DType::kBF16) {
    return load_bf16(reinterpret_cast<const std::uint16_t*>(row) + i);
  } else if constexpr (kStored == DType::kF16) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(row) + i);
  } else if constexpr (kStored == DType::kF8E4M3) {
    return load_f8(reinterpret_cast<const unsigned char*>(row) + i);
  } else if constexpr (kStored == DType::kI16) {  // pairs of int8 elements
    return load_i8_pairs(reinterpret_cast<const signed char*>(row) + 2 * i);
  } else {
    static_assert(kStored == DType::kI8);
    return load_i8(reinterpret_cast<const signed char*>(row) + i);
  }
}

/// Loads elements [i, dim) of a row, fewer than kLanes, and zeros.
template <class V, DType kStored>
inline V load_stored_last(const char* row, std::int64_t i, std::int64_t dim) {
  alignas(64) char last[64];
  const std::int64_t size = static_cast<std::int64_t>(size_of(kStored));
  copy_first(last, row + i * size, (dim - i) * size);
  return load_stored<V, kStored>(last, 0);
}

/// Whether load_stored() can read rows of this dtype in place: for f64 kernels f64 only, for the
/// others all but f64.
template <class V>
inline bool loads_stored(DType dtype) {
  return (dtype == DType::kF64) == (sizeof(typename V::Scalar) == 8);
}

/// Calls function(StoredAs<dtype>) for a dtype that loads_stored() accepts.
template <class V, class Function>
inline void with_stored(DType dtype, const Function& function) {
  constexpr DType kCompute = kDTypeOf<typename V::Scalar>;
  if constexpr (kCompute == DType::kF32) {
    if (needs_scale(dtype)) return with_code_dtype(dtype, function);
    if (dtype != kCompute) return with_half_dtype(dtype, function);
  }
  function(StoredAs<kCompute>{});
}

/// Rows of one dtype at any addresses.
struct StoredRows {
  const char* const* rows = nullptr;
  std::int64_t offset = 0;  // bytes, added to each row's address

  const char* operator[](std::int64_t i) const { return rows[i] + offset; }
  StoredRows from(std::int64_t i) const { return {rows + i, offset}; }
};

/// Whether every element of every row is finite: x - x is 0 for a finite x, else NaN, which no
/// later addition removes.
template <class V, DType kStored>
inline bool all_finite(const StoredRows& rows, std::int64_t count, std::int64_t dim) {
  if constexpr (needs_scale(kStored)) return true;  // scales are in the weights
  V trace = zero<V>();
  for (std::int64_t row = 0; row < count; ++row) {
    std::int64_t i = 0;
    for (; i + V::kLanes <= dim; i += V::kLanes) {
      const V value = load_stored<V, kStored>(rows[row], i);
      trace = trace + (value - value);
    }
    if (i == dim) continue;
    const V value = load_stored_last<V, kStored>(rows[row], i, dim);
    trace = trace + (value - value);
  }
  return sum(trace) == 0;
}

}  // namespace
}  // namespace ladon::cpu
