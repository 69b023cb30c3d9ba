// Tensor-core products and the copies that feed them: thin wrappers of PTX instructions, by the
// names of what they do.
//
// Fragments, with g = lane / 4 and t = lane % 4 (PTX ISA, mma.m16n8k16 and ldmatrix):
//   A 16 x 16: registers (row g, k 2t), (row g + 8, k 2t), (row g, k 2t + 8), (row g + 8, k 2t + 8)
//   B 16 x 8:  registers (k 2t, column g), (k 2t + 8, column g)
//   C 16 x 8:  floats (row g, column 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1)
// A register holds two neighbours along k, the lower in its lower half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/l2_policy.h"

namespace ladon::cuda {

__device__ inline std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

/// A copy that the compiler takes for new. What is computed from it is not kept in registers from
/// one loop to the next.
__device__ inline std::uint32_t fresh(std::uint32_t x) {
  asm volatile("" : "+r"(x));
  return x;
}

/// Starts a copy of 16 bytes to shared memory, of which the first `bytes` are read and the rest
/// become 0.
__device__ inline void copy_async_16(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
/// The same for what no other block of threads reads, such as keys and values in decoding: L2
/// replaces it before anything else, so that weights which were prefetched stay there.
__device__ inline void copy_async_16_once(std::uint32_t to, const void* from, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(to),
               "l"(from), "r"(bytes), "l"(hopper::L2Policy::kEvictFirst)
               : "memory");
#else
  copy_async_16(to, from, bytes);
#endif
}
/// copy_async_16() for 8 bytes.
__device__ inline void copy_async_8(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
/// The same for 4 bytes.
__device__ inline void copy_async_4(std::uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
/// All 16 bytes, with a hint to fetch their neighbours; or zeros where `valid` is false: `from` is
/// not read then.
__device__ inline void copy_async_line(std::uint32_t to, const void* from, bool valid) {
  asm volatile(
      "{\n"
      ".reg .pred ignored;\n"
      "setp.eq.s32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n"
      "}" ::"r"(to),
      "l"(__cvta_generic_to_global(from)), "r"(static_cast<int>(valid))
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
/// Waits until all but the last kPending groups of this thread's copies have arrived.
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
/// Waits for all of them, committed or not.
__device__ inline void wait_for_all_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

/// 16 bytes to shared memory.
__device__ inline void store_16(std::uint32_t to, std::uint32_t w0, std::uint32_t w1,
                                std::uint32_t w2, std::uint32_t w3) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(w0), "r"(w1), "r"(w2),
               "r"(w3)
               : "memory");
}

/// 8 bytes to shared memory.
__device__ inline void store_8(std::uint32_t to, std::uint32_t w0, std::uint32_t w1) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(w0), "r"(w1) : "memory");
}

/// Four 8 x 8 matrices; lane i gives the address of row i % 8 of matrix i / 8.
__device__ inline void load_matrices(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(std::uint32_t (&to)[4], std::uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address)
               : "memory");
}

/// sums[16 x 8] += a[16 x 16] b[16 x 8].
template <class Half>
__device__ inline void multiply_add(float (&sums)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                    std::uint32_t b1) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/// Two elements in one register, the first in the lower half; rounded to nearest even.
template <class Half>
__device__ inline std::uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  } else {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const std::uint32_t*>(&pair);
  }
}

/// 2^x with an error of 2 units in the last place; results below 2^-126 are 0.
__device__ inline float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

/// Of a block of so many warps.
template <int kWarps>
__device__ __forceinline__ void synchronize_warps() {
  if constexpr (kWarps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

}  // namespace ladon::cuda
