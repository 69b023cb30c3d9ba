// Products of a warpgroup that add to sums or begin them: sums[64 x 128] (+)= a[64 x 16] b[16 x
// 128], both operands in shared memory. As start_product() of wgmma.cuh, which says what a thread
// holds.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

#define LADON_SUMS_4(s, n) "+f"((s)[n][0]), "+f"((s)[n][1]), "+f"((s)[n][2]), "+f"((s)[n][3])
#define LADON_SUMS_16(s, n) \
  LADON_SUMS_4(s, n), LADON_SUMS_4(s, (n) + 1), LADON_SUMS_4(s, (n) + 2), LADON_SUMS_4(s, (n) + 3)
#define LADON_SUMS_64(s) \
  LADON_SUMS_16(s, 0), LADON_SUMS_16(s, 4), LADON_SUMS_16(s, 8), LADON_SUMS_16(s, 12)
#define LADON_START_SUM(types)                                                        \
  "{\n"                                                                               \
  ".reg .pred adds;\n"                                                                \
  "setp.ne.b32 adds, %66, 0;\n"                                                       \
  "wgmma.mma_async.sync.aligned.m64n128k16.f32." types                                \
  " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "  \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "  \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, " \
  "%64, %65, adds, 1, 1, 0, 1;\n"                                                     \
  "}"

/// Rows of A in memory are rows of the product, rows of B steps of k. Unless `adds`, the sums that
/// were there do not count.
template <class Half>
__device__ __forceinline__ void start_sum(float (&sums)[16][4], std::uint64_t a, std::uint64_t b,
                                          bool adds) {
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {
    asm volatile(LADON_START_SUM("bf16.bf16")
                 : LADON_SUMS_64(sums)
                 : "l"(a), "l"(b), "r"(adds ? 1 : 0));
  } else {
    asm volatile(LADON_START_SUM("f16.f16")
                 : LADON_SUMS_64(sums)
                 : "l"(a), "l"(b), "r"(adds ? 1 : 0));
  }
}

#undef LADON_START_SUM
#undef LADON_SUMS_64
#undef LADON_SUMS_16
#undef LADON_SUMS_4

}  // namespace ladon::cuda::hopper
