// Rows in shared memory that threads of Hopper's backward kernel look at, or write for products.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// Whether one of `threads` threads finds NaN or infinity in its part of the rows.
template <class Half, class Pair>
__device__ inline bool finds_non_finite(const Pair& pair, int thread, int threads) {
  constexpr bool kBf16 = std::is_same_v<Half, __nv_bfloat16>;
  constexpr std::uint32_t kExponents = kBf16 ? 0x7f807f80 : 0x7c007c00;  // of two elements
  constexpr std::uint32_t kOnes = kBf16 ? 0x00800080 : 0x04000400;       // their lowest bits
  constexpr int kChunks = static_cast<int>(sizeof(Pair) / sizeof(uint4));
  const auto* const chunks = reinterpret_cast<const uint4*>(&pair);
  std::uint32_t sums = 0;  // an exponent of ones passes into the bit above
#pragma unroll 4
  for (int i = thread; i < kChunks; i += threads) {
    const uint4 chunk = chunks[i];
    sums |= (chunk.x & kExponents) + kOnes;
    sums |= (chunk.y & kExponents) + kOnes;
    sums |= (chunk.z & kExponents) + kOnes;
    sums |= (chunk.w & kExponents) + kOnes;
  }
  return (sums & 0x80008000U) != 0;
}

/// Sets rows without their bit in `live` to 0; products may read the tile after the threads that
/// call it have met at a barrier.
template <class Pair>
__device__ inline void zero_dead_rows(Pair& pair, std::uint64_t live, int thread, int threads) {
  constexpr int kChunkBytes = 16;
  constexpr int kChunks = static_cast<int>(sizeof(Pair)) / kChunkBytes;
  const std::uint32_t address = shared_address(&pair);
  for (int chunk = thread; chunk < kChunks; chunk += threads) {
    const int row = chunk * kChunkBytes / kBoxRowBytes % Pair::kRows;
    if ((live >> row & 1) == 0) {
      store_16(address + static_cast<unsigned>(chunk * kChunkBytes), 0, 0, 0, 0);
    }
  }
  publish_writes();
}

}  // namespace ladon::cuda::hopper
