// Tensor-core products and the copies that feed them: thin wrappers of PTX instructions, by the
// names of what they do.
//
// A tile in shared memory is rows of kTileColumns 16-bit elements. The 16-byte chunks of a row are
// permuted by the row's last three bits, so that the eight rows of an 8x8 matrix are in different
// banks.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ladon::cuda {

inline constexpr int kTileColumns = 128;
inline constexpr int kChunkElements = 8;                           // 16 bytes
inline constexpr int kTileChunks = kTileColumns / kChunkElements;  // of one row
inline constexpr int kTileRowBytes = kTileColumns * 2;

/// The byte offset of a chunk in a tile.
__device__ inline unsigned chunk_offset(int row, int chunk) {
  return static_cast<unsigned>(row * kTileRowBytes + ((chunk ^ (row & 7)) * 16));
}

__device__ inline unsigned shared_address(const void* p) {
  return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

/// Starts a copy of 16 bytes, of which the first `bytes` are read and the rest set to 0.
__device__ inline void copy_async_16(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }
/// Waits until all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending) : "memory");
}

/// Four 8x8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(unsigned (&to)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

/// sums[16x8] += a[16x16] b[16x8]. Lane 4g + t holds rows g and g + 8, columns 2t and 2t + 1 of the
/// sums.
template <class Half>
__device__ inline void multiply_add(float (&sums)[4], const unsigned (&a)[4], unsigned b0,
                                    unsigned b1) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two elements in one register, the first in the low half; rounded to nearest even.
template <class Half>
__device__ inline unsigned pack(float low, float high) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
  }
}

/// Two 16-bit elements without their infinities and NaN, which become bf16 of their own, one for
/// each sign: products with kHuge overflow to infinities. NaN has both, so that their sum is NaN;
/// all others are exact zeros. Apart, because opposite signs would cancel before a tensor core
/// overflows.
struct NonFinite {
  static constexpr unsigned kHuge = 0x7e80U;  // 2^126
  unsigned finite = 0;
  unsigned positive = 0;
  unsigned negative = 0;
};
template <class Half>
__device__ inline NonFinite take_out_non_finite(unsigned pair) {
  constexpr unsigned kExponent = std::is_same_v<Half, __nv_bfloat16> ? 0x7f80U : 0x7c00U;
  NonFinite parts;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const unsigned bits = pair >> shift & 0xffffU;
    if ((bits & kExponent) != kExponent) {
      parts.finite |= bits << shift;
      continue;
    }
    const bool is_nan = (bits & 0x7fffU) != kExponent;
    const bool is_negative = (bits & 0x8000U) != 0;
    if (is_nan || !is_negative) parts.positive |= NonFinite::kHuge << shift;
    if (is_nan || is_negative) parts.negative |= (NonFinite::kHuge | 0x8000U) << shift;
  }
  return parts;
}

}  // namespace ladon::cuda
