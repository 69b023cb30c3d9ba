// Elements of tensors on the device: conversions between storage and compute types, and the loops
// that give each element or each row to a thread.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "ladon/dtype.h"

namespace ladon::cuda {

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(double x) { return static_cast<float>(x); }
__device__ inline float to_float(__half x) { return __half2float(x); }
__device__ inline float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float to_float(signed char x) { return static_cast<float>(x); }
/// Without a branch: the bits at the place of a float's, whose exponent has a bias 120 larger.
__device__ inline float to_float(float8_e4m3 x) {
  const unsigned magnitude = x.bits & 0x7fU;
  const float number =
      __uint_as_float((x.bits & 0x80U) << 24 | magnitude << 20) * __uint_as_float(0x7b800000U);
  return magnitude == 0x7fU ? __uint_as_float(0x7fc00000U) : number;
}

/// Calls function(T{}) with the storage type of a float dtype. Validation refuses the others; the
/// switch names them all, so that the compiler points here when there is a new one.
template <class Function>
__host__ __device__ inline auto with_storage_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF64: return function(double{});
    case DType::kF16: return function(__half{});
    case DType::kBF16: return function(__nv_bfloat16{});
    case DType::kF32:
    case DType::kBool:
    case DType::kI8:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kF8E4M3: break;
  }
  return function(float{});
}

/// A stored dtype as a type, for generic lambdas.
template <DType kType>
struct StoredAs {
  static constexpr DType kDType = kType;
};

/// Calls function(StoredAs<D>{}) with the dtype of elements that have scales. Validation refuses
/// the others; the switch names them all, so that the compiler points here when there is a new one.
template <class Function>
__host__ __device__ inline auto with_quantised_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF8E4M3: return function(StoredAs<DType::kF8E4M3>{});
    case DType::kI8:
    case DType::kF64:
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16:
    case DType::kBool:
    case DType::kU8:
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64: break;
  }
  return function(StoredAs<DType::kI8>{});
}

/// Element `index` of a float array, in the compute type float or double.
template <class Compute>
__device__ inline Compute load_element(const void* data, DType dtype, std::int64_t index) {
  switch (dtype) {
    case DType::kF64: return static_cast<Compute>(static_cast<const double*>(data)[index]);
    case DType::kF32: return static_cast<Compute>(static_cast<const float*>(data)[index]);
    case DType::kF16: return __half2float(static_cast<const __half*>(data)[index]);
    case DType::kBF16: return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
    case DType::kI8: return static_cast<Compute>(static_cast<const signed char*>(data)[index]);
    case DType::kBool:
    case DType::kU8: return static_cast<Compute>(static_cast<const unsigned char*>(data)[index]);
    case DType::kI16:
    case DType::kU16:
    case DType::kI32:
    case DType::kU32:
    case DType::kI64:
    case DType::kU64:
    case DType::kF8E4M3: break;
  }
  return 0;
}

/// The same, of a cache: fp8, too, which elsewhere would only cost registers.
template <class Compute>
__device__ inline Compute load_stored_element(const void* data, DType dtype, std::int64_t index) {
  if (dtype != DType::kF8E4M3) return load_element<Compute>(data, dtype, index);
  return to_float(static_cast<const float8_e4m3*>(data)[index]);
}

/// Rounds once, to nearest even.
template <class Stored, class Compute>
__device__ inline Stored rounded(Compute value) {
  if constexpr (sizeof(Stored) > 2) {
    return static_cast<Stored>(value);
  } else {
    float narrowed = 0;
    if constexpr (sizeof(Compute) == 8) {
      narrowed = ladon::detail::round_to_odd(value);  // so that the second rounding is the only one
    } else {
      narrowed = value;
    }
    if constexpr (std::is_same_v<Stored, __half>) {
      return __float2half_rn(narrowed);
    } else {
      return __float2bfloat16_rn(narrowed);
    }
  }
}

/// Rounds a float or a double once and stores it as a float dtype.
template <class Compute>
__device__ inline void store_element(void* data, DType dtype, std::int64_t index, Compute value) {
  with_storage_type(dtype, [&](auto zero) {
    using Stored = decltype(zero);
    static_cast<Stored*>(data)[index] = rounded<Stored>(value);
  });
}

}  // namespace ladon::cuda
