// The sizes of one core's caches. Blocks that may have any size without changing a bit are derived
// from them: row strips (kernel_table.h), KV heads of a decoding task (drivers/forward_plan.h) and
// what is written past the caches (drivers/elements.cpp).
#pragma once

#include <cstdint>

namespace ladon::cpu {

struct CacheSizes {
  std::int64_t l1 = 0;  // data
  std::int64_t l2 = 0;
  std::int64_t l3 = 0;  // all of it, though other cores use it too
};

/// What CPUID says, or LADON_CACHE_SIZES: L1, L2 and L3 in KiB, such as "32,512,16384", which lets
/// a machine choose as another would. Sizes that neither gives, or that are not plausible, are 32
/// KiB, 512 KiB and 32 MiB. Looked up once: sizes of scratch memory depend on it.
const CacheSizes& cache_sizes() noexcept;

}  // namespace ladon::cpu
