// Products of a warpgroup (wgmma.cuh) with few columns: N of 16, 32, 48, 64 or 96, both operands in
// shared memory and contiguous along k.
#pragma once

#include <cstdint>

#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

#define LADON_SUMS_4(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define LADON_SUMS_8(n) LADON_SUMS_4(n), LADON_SUMS_4((n) + 1)
#define LADON_SUMS_16(n) LADON_SUMS_8(n), LADON_SUMS_8((n) + 2)
// The names of the sums in the instruction.
#define LADON_NAMES_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define LADON_NAMES_16 LADON_NAMES_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define LADON_NAMES_24 LADON_NAMES_16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define LADON_NAMES_32 LADON_NAMES_24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define LADON_NAMES_40 LADON_NAMES_32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define LADON_NAMES_48 LADON_NAMES_40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define LADON_PRODUCT(columns, type, names, operands, ...)                                     \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type " {" names \
               "}, " operands ", 1, 1, 0, 0;"                                                  \
               : __VA_ARGS__                                                                   \
               : "l"(a), "l"(b), "n"(kAdds ? 1 : 0))
#define LADON_PRODUCT_OF(columns, names, operands, ...)           \
  if constexpr (std::is_same_v<Half, __nv_bfloat16>) {            \
    LADON_PRODUCT(columns, "bf16", names, operands, __VA_ARGS__); \
  } else {                                                        \
    LADON_PRODUCT(columns, "f16", names, operands, __VA_ARGS__);  \
  }

/// Starts sums += a b, or sums = a b without kAdds. Rows of A and B in memory are rows and columns
/// of the product; kGroups is N / 8.
template <class Half, bool kAdds, int kGroups>
__device__ __forceinline__ void start_narrow_product(float (&sums)[kGroups][4], std::uint64_t a,
                                                     std::uint64_t b) {
  static_assert(kGroups == 2 || kGroups == 4 || kGroups == 6 || kGroups == 8 || kGroups == 12);
  if constexpr (kGroups == 2) {
    LADON_PRODUCT_OF("16", LADON_NAMES_8, "%8, %9, %10", LADON_SUMS_8(0));
  } else if constexpr (kGroups == 4) {
    LADON_PRODUCT_OF("32", LADON_NAMES_16, "%16, %17, %18", LADON_SUMS_16(0));
  } else if constexpr (kGroups == 6) {
    LADON_PRODUCT_OF("48", LADON_NAMES_24, "%24, %25, %26", LADON_SUMS_16(0), LADON_SUMS_8(4));
  } else if constexpr (kGroups == 8) {
    LADON_PRODUCT_OF("64", LADON_NAMES_32, "%32, %33, %34", LADON_SUMS_16(0), LADON_SUMS_16(4));
  } else {
    LADON_PRODUCT_OF("96", LADON_NAMES_48, "%48, %49, %50", LADON_SUMS_16(0), LADON_SUMS_16(4),
                     LADON_SUMS_16(8));
  }
}

#undef LADON_PRODUCT_OF
#undef LADON_PRODUCT
#undef LADON_NAMES_48
#undef LADON_NAMES_40
#undef LADON_NAMES_32
#undef LADON_NAMES_24
#undef LADON_NAMES_16
#undef LADON_NAMES_8
#undef LADON_SUMS_16
#undef LADON_SUMS_8
#undef LADON_SUMS_4

}  // namespace ladon::cuda::hopper
