// Elements of quantised caches, int8 and fp8 (e4m3), as operands of tensor cores: 16-bit floats, in
// which all of them are exact. Their scales are applied elsewhere.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "ladon/dtype.h"

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

/// Converts pairs of quantised elements to pairs of 16-bit floats: bytes kFirst and kSecond of a
/// word. Four instructions a pair (f16 of int8: two and a half); conversions by way of f32 take
/// more, on units with a quarter of the rate.
template <class Half, DType kStored>
class CodePairs;

/// An exponent above a byte makes a float of it: 1024 + byte in f16. bf16 has one bit less, so
/// there it is 128 + the byte without its sign bit, from which 128 or, by that bit, 256 is
/// subtracted.
template <class Half>
class CodePairs<Half, DType::kI8> {
  static constexpr bool kBf16 = std::is_same_v<Half, __nv_bfloat16>;

 public:
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

 private:
  // In a register: as a constant it takes the operand's place that the selector could have.
  const unsigned exponents_ = fresh(kBf16 ? 0x43434343U : 0x64646464U);
};

/// e4m3 has the leading bits of a 16-bit float with a longer exponent of a larger bias: shifted to
/// its place, a number comes out too small by the difference of the biases, 2^8 in f16 and 2^120 in
/// bf16, subnormals included. The codes of NaN, which caches do not contain, become +-480.
template <class Half>
class CodePairs<Half, DType::kF8E4M3> {
 public:
  template <unsigned kFirst, unsigned kSecond>
  __device__ __forceinline__ unsigned pair(unsigned word) const {
    // Each byte, and its sign over the byte above it.
    constexpr unsigned kSelector = kFirst | (kFirst | 8) << 4 | kSecond << 8 | (kSecond | 8) << 12;
    unsigned extended;
    unsigned pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(word), "n"(kSelector));
    if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
      asm("fma.rn.bf16x2 %0, %1, %2, %3;"
          : "=r"(pair)
          : "r"(extended << 4 & 0x87f087f0U), "r"(0x7b807b80U), "r"(0x80008000U));
    } else {
      asm("mul.rn.f16x2 %0, %1, %2;"
          : "=r"(pair)
          : "r"(extended << 7 & 0xbf80bf80U), "r"(0x5c005c00U));
    }
    return pair;
  }
};

template <class Half, DType kStored>
__device__ __forceinline__ uint4 convert_eight(uint2 codes) {
  const CodePairs<Half, kStored> pairs;
  return make_uint4(pairs.template pair<0, 1>(codes.x), pairs.template pair<2, 3>(codes.x),
                    pairs.template pair<0, 1>(codes.y), pairs.template pair<2, 3>(codes.y));
}

/// Eight bytes from memory, of which `count` exist.
__device__ __forceinline__ uint2 load_codes(const unsigned char* from, int count, bool aligned) {
  if (aligned && count == kChunkElements) return *reinterpret_cast<const uint2*>(from);
  union {
    uint2 vector;
    unsigned char elements[kChunkElements];
  } chunk;
  chunk.vector = make_uint2(0, 0);
#pragma unroll
  for (int i = 0; i < kChunkElements; ++i) {
    if (i < count) chunk.elements[i] = from[i];
  }
  return chunk.vector;
}

/// Stores eight elements of a query, or of a key of a quantised cache, in the order in which the
/// products of such caches take them: of 16 neighbours, lane t of four has 4 t to 4 t + 3, because
/// that is what a load of bytes gives it (decode_scaled.cuh), as its 2 t, 2 t + 1, 2 t + 8 and
/// 2 t + 9. Every kernel sums them in this order. `to` is the address of the first of the two
/// 16-byte chunks of those 16, plus 8 for the last eight of them.
__device__ __forceinline__ void store_product_order(unsigned to, const uint4& eight) {
  store_8(to, eight.x, eight.z);
  store_8(to ^ 16, eight.y, eight.w);  // chunks are permuted in pairs
}

}  // namespace ladon::cuda
