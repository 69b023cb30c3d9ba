// Products of a warpgroup (wgmma): sums[64 x N] += a[64 x 16] b[16 x N], with A in registers and B
// in shared memory.
//
// A thread holds of the sums what it holds of an m16n8k16 product, for N / 8 groups of columns:
// sums[n][e] is of row e / 2 of its two (lane / 4 and 8 below, of the warp's 16) and column
// 8 n + 2 (lane % 4) + e % 2; A is as in tensor_core.cuh. The bits are those of mma.sync, too,
// where the steps of 16 come in the same order.
//
// Between the start of products and finish_products(), nothing may touch their registers.
#pragma once

#include <cstdint>

#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kGroupRows = 64;

/// Tells the compiler that all threads of the warp have the same value: it must not take the code
/// that products start in for divergent.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffffU, value, 0); }

/// A tile in shared memory, in boxes of 64 columns with permuted chunks (bulk_copy.cuh). Only the
/// low word of its descriptor varies: 16-byte units of the address, and those between boxes.
class TileOperand {
 public:
  /// The tile is the same for all threads; a uniform register wants to be told.
  __device__ __forceinline__ TileOperand(std::uint32_t address, int box_bytes)
      : low_(__shfl_sync(0xffffffffU,
                         (address & 0x3ffffU) >> 4 | static_cast<unsigned>(box_bytes >> 4) << 16,
                         0)) {}

  /// `bytes` further into the tile.
  __device__ __forceinline__ std::uint64_t descriptor(int bytes) const {
    // 128-byte swizzle; groups of 8 rows are 1024 bytes apart.
    constexpr std::uint64_t kHigh = std::uint64_t{0x40000040} << 32;
    return kHigh | (low_ + static_cast<unsigned>(bytes >> 4));
  }

 private:
  const unsigned low_;
};

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
/// Ends a group of products, which is waited for as one.
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
/// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void finish_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
/// Keeps the compiler from moving uses of accumulators, and what makes operands, across this place.
__device__ __forceinline__ void hold_in_place(float& sum) {
  asm volatile("" : "+f"(sum)::"memory");
}
__device__ __forceinline__ void hold_in_place(std::uint32_t& operand) {
  asm volatile("" : "+r"(operand)::"memory");
}
template <class Sums, int kCount>
__device__ __forceinline__ void hold_in_place(Sums (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) hold_in_place(sums[i]);
}

/// The assembler would move a wait for products up to before the softmax that is to run during
/// them. It does not move it past a store, and this one, which never happens, needs the softmax's
/// sums, which are not negative. `anywhere` is in shared memory.
__device__ __forceinline__ void finish_before_wait(float first_sum, float second_sum,
                                                   const void* anywhere) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.f32 never, %0, 0f00000000;\n"
      "@never st.shared.f32 [%2], %0;\n"
      "setp.lt.f32 never, %1, 0f00000000;\n"
      "@never st.shared.f32 [%2], %1;\n"
      "}" ::"f"(first_sum),
      "f"(second_sum), "r"(shared_address(anywhere))
      : "memory");
}

/// The same for weights, which are not negative either: those that are NaN may be stored.
template <int kGroups>
__device__ __forceinline__ void finish_before_wait(const float (&weights)[kGroups][4],
                                                   const void* anywhere) {
  std::uint32_t signs = 0;
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) signs |= __float_as_uint(weights[n][i]);
  }
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.s32 never, %0, 0;\n"
      "@never st.shared.b32 [%1], %0;\n"
      "}" ::"r"(signs),
      "r"(shared_address(anywhere))
      : "memory");
}

/// Keeps operands A of products in their registers up to here, behind the wait. Products read them
/// until they are done, but the assembler (ptxas 13.0) takes their registers for free as soon as
/// the products have been started, if another group is waited for first. The same store.
__device__ __forceinline__ void keep_operands(const std::uint32_t (&a)[4], float sum,
                                              const void* anywhere) {
  asm volatile(
      "{\n"
      ".reg .pred never;\n"
      "setp.lt.f32 never, %4, 0f00000000;\n"
      "@never st.shared.v4.b32 [%5], {%0, %1, %2, %3};\n"
      "}" ::"r"(a[0]),
      "r"(a[1]), "r"(a[2]), "r"(a[3]), "f"(sum), "r"(shared_address(anywhere))
      : "memory");
}
template <int kSteps>
__device__ __forceinline__ void keep_operands(const std::uint32_t (&a)[kSteps][4], float sum,
                                              const void* anywhere) {
#pragma unroll
  for (int i = 0; i < kSteps; ++i) keep_operands(a[i], sum, anywhere);
}
template <int kBlocks, int kSteps>
__device__ __forceinline__ void keep_operands(const std::uint32_t (&a)[kBlocks][kSteps][4],
                                              float sum, const void* anywhere) {
#pragma unroll
  for (int i = 0; i < kBlocks; ++i) keep_operands(a[i], sum, anywhere);
}

#define LADON_SUMS_4(s, n) "+f"((s)[n][0]), "+f"((s)[n][1]), "+f"((s)[n][2]), "+f"((s)[n][3])
#define LADON_SUMS_16(s, n) \
  LADON_SUMS_4(s, n), LADON_SUMS_4(s, (n) + 1), LADON_SUMS_4(s, (n) + 2), LADON_SUMS_4(s, (n) + 3)
#define LADON_SUMS_32(s, n) LADON_SUMS_16(s, n), LADON_SUMS_16(s, (n) + 4)
#define LADON_SUMS_64(s, n) LADON_SUMS_32(s, n), LADON_SUMS_32(s, (n) + 8)
// The names of the sums in the instruction.
#define LADON_NAMES_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define LADON_NAMES_32                                                     \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LADON_NAMES_64                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "           \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

#define LADON_SUMS_88(s, n)                                                   \
  LADON_SUMS_64(s, n), LADON_SUMS_16(s, (n) + 16), LADON_SUMS_4(s, (n) + 20), \
      LADON_SUMS_4(s, (n) + 21)
#define LADON_NAMES_88                                                                      \
  LADON_NAMES_64                                                                            \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, " \
  "%81, %82, %83, %84, %85, %86, %87"
#define LADON_SUMS_96(s, n) LADON_SUMS_64(s, n), LADON_SUMS_32(s, (n) + 16)
#define LADON_NAMES_96                                                            \
  LADON_NAMES_64                                                                  \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, " \
  "%79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"

#define LADON_SUMS_128(s, n) LADON_SUMS_64(s, n), LADON_SUMS_64(s, (n) + 16)
#define LADON_NAMES_128                                                                  \
  LADON_NAMES_96                                                                         \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, "   \
  "%110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, " \
  "%124, %125, %126, %127"

/// Starts sums += a b with A in registers. kTransposed: rows of B in memory are steps of k, else
/// columns of the product. Without kAdds the sums that were there do not count.
template <class Half, bool kTransposed, bool kAdds = true, int kGroups>
__device__ __forceinline__ void start_product(float (&sums)[kGroups][4],
                                              const std::uint32_t (&a)[4], std::uint64_t b) {
  constexpr bool kBf16 = std::is_same_v<Half, __nv_bfloat16>;
  static_assert(kGroups == 8 || kGroups == 16 || kGroups == 24 || kGroups == 32);
  if constexpr (kGroups == 8 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LADON_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, %37, 1, 1, %38;"
                 : LADON_SUMS_32(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kGroups == 8) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" LADON_NAMES_32
                 "}, {%32, %33, %34, %35}, %36, %37, 1, 1, %38;"
                 : LADON_SUMS_32(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kGroups == 32 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {" LADON_NAMES_128
                 "}, {%128, %129, %130, %131}, %132, %133, 1, 1, %134;"
                 : LADON_SUMS_128(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kGroups == 32) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 {" LADON_NAMES_128
                 "}, {%128, %129, %130, %131}, %132, %133, 1, 1, %134;"
                 : LADON_SUMS_128(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kGroups == 16 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LADON_NAMES_64
                 "}, {%64, %65, %66, %67}, %68, %69, 1, 1, %70;"
                 : LADON_SUMS_64(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kGroups == 16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LADON_NAMES_64
                 "}, {%64, %65, %66, %67}, %68, %69, 1, 1, %70;"
                 : LADON_SUMS_64(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else if constexpr (kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" LADON_NAMES_96
                 "}, {%96, %97, %98, %99}, %100, %101, 1, 1, %102;"
                 : LADON_SUMS_96(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" LADON_NAMES_96
                 "}, {%96, %97, %98, %99}, %100, %101, 1, 1, %102;"
                 : LADON_SUMS_96(sums, 0)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kAdds ? 1 : 0),
                   "n"(kTransposed ? 1 : 0));
  }
}

/// The same with A in shared memory. Rows of A and B in memory are rows and columns of the product,
/// or steps of k where they are transposed.
template <class Half, bool kAdds, bool kTransposedA = false, bool kTransposedB = false, int kGroups>
__device__ __forceinline__ void start_product(float (&sums)[kGroups][4], std::uint64_t a,
                                              std::uint64_t b) {
  constexpr bool kBf16 = std::is_same_v<Half, __nv_bfloat16>;
  static_assert((kGroups == 4 && kBf16) || kGroups == 8 || kGroups == 16 || kGroups == 22 ||
                kGroups == 24);
  if constexpr (kGroups == 4) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {" LADON_NAMES_16
                 "}, %16, %17, %18, 1, 1, %19, %20;"
                 : LADON_SUMS_16(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 8 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" LADON_NAMES_32
                 "}, %32, %33, %34, 1, 1, %35, %36;"
                 : LADON_SUMS_32(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 8) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {" LADON_NAMES_32
                 "}, %32, %33, %34, 1, 1, %35, %36;"
                 : LADON_SUMS_32(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 16 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" LADON_NAMES_64
                 "}, %64, %65, %66, 1, 1, %67, %68;"
                 : LADON_SUMS_64(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" LADON_NAMES_64
                 "}, %64, %65, %66, 1, 1, %67, %68;"
                 : LADON_SUMS_64(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 22 && kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n176k16.f32.bf16.bf16 {" LADON_NAMES_88
                 "}, %88, %89, %90, 1, 1, %91, %92;"
                 : LADON_SUMS_88(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kGroups == 22) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n176k16.f32.f16.f16 {" LADON_NAMES_88
                 "}, %88, %89, %90, 1, 1, %91, %92;"
                 : LADON_SUMS_88(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else if constexpr (kBf16) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 {" LADON_NAMES_96
                 "}, %96, %97, %98, 1, 1, %99, %100;"
                 : LADON_SUMS_96(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n192k16.f32.f16.f16 {" LADON_NAMES_96
                 "}, %96, %97, %98, 1, 1, %99, %100;"
                 : LADON_SUMS_96(sums, 0)
                 : "l"(a), "l"(b), "n"(kAdds ? 1 : 0), "n"(kTransposedA ? 1 : 0),
                   "n"(kTransposedB ? 1 : 0));
  }
}

#undef LADON_NAMES_128
#undef LADON_SUMS_128
#undef LADON_NAMES_96
#undef LADON_NAMES_88
#undef LADON_SUMS_96
#undef LADON_SUMS_88
#undef LADON_NAMES_64
#undef LADON_NAMES_32
#undef LADON_NAMES_16
#undef LADON_SUMS_64
#undef LADON_SUMS_32
#undef LADON_SUMS_16
#undef LADON_SUMS_4

}  // namespace ladon::cuda::hopper
