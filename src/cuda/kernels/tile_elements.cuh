// int8 elements of quantised caches as operands of tensor cores: 16-bit floats, in which all of
// them are exact. Their scales are applied elsewhere.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

inline constexpr int kChunkElements = 8;  // 16-bit: 16 bytes

/// 16 bytes: eight elements from memory, of which `count` exist. Half is what the tile holds.
template <class Half>
__device__ __forceinline__ uint4 load_eight(const Half* from, int count) {
  union {
    uint4 vector;
    Half elements[kChunkElements];
  } chunk;
  chunk.vector = make_uint4(0, 0, 0, 0);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (i < count) chunk.elements[i] = from[i];
  }
  return chunk.vector;
}

/// Converts pairs of int8 to pairs of 16-bit floats.
///
/// An exponent above a byte makes a float of it: 1024 + byte in f16. bf16 has one bit less, so
/// there it is 128 + the byte without its sign bit, from which 128 or, by that bit, 256 is
/// subtracted. Four instructions a pair; conversions by way of f32 take more, on units with a
/// quarter of the rate.
template <class Half>
class IntegerPairs {
  static constexpr bool kBf16 = std::is_same_v<Half, __nv_bfloat16>;

 public:
  /// Bytes kFirst and kSecond of a word.
  template <unsigned kFirst, unsigned kSecond>
  __device__ __forceinline__ unsigned pair(unsigned word) const {
    constexpr unsigned kSelector = 0x4040 | kFirst | kSecond << 8;
    unsigned pair;
    if constexpr (kBf16) {
      const unsigned floats = __byte_perm(word, exponents_, kSelector);
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(pair)
          : "r"(floats & 0xff80ff80U), "r"(0xbf80bf80U), "r"(floats & 0xff7fff7fU));
    } else {
      const unsigned floats = __byte_perm(word ^ 0x80808080U, exponents_, kSelector);
      asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(floats), "r"(0x64806480U));
    }
    return pair;
  }

  __device__ __forceinline__ uint4 eight(uint2 integers) const {
    return make_uint4(pair<0, 1>(integers.x), pair<2, 3>(integers.x), pair<0, 1>(integers.y),
                      pair<2, 3>(integers.y));
  }

 private:
  // In a register: as a constant it takes the operand's place that the selector could have.
  const unsigned exponents_ = fresh(kBf16 ? 0x43434343U : 0x64646464U);
};

/// Eight int8 from memory, of which `count` exist.
__device__ __forceinline__ uint2 load_integers(const signed char* from, int count, bool aligned) {
  if (aligned && count == kChunkElements) return *reinterpret_cast<const uint2*>(from);
  union {
    uint2 vector;
    signed char elements[kChunkElements];
  } chunk;
  chunk.vector = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (i < count) chunk.elements[i] = from[i];
  }
  return chunk.vector;
}

}  // namespace ladon::cuda
