// Operands of Hopper's backward kernel that threads write: rows in shared memory, and P and dS.
#pragma once

#include <cstdint>

#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// Lets products and bulk copies of other threads, after a barrier, see what this one has stored.
__device__ __forceinline__ void publish_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Waits for all of the `threads` threads that use the barrier; 0 is __syncthreads().
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
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

/// Rounds P or dS to the operand A of products over a step's rows.
template <class Half, int kGroups, int kSteps>
__device__ __forceinline__ void pack_operand(const float (&values)[kGroups][4],
                                             std::uint32_t (&a)[kSteps][4]) {
  static_assert(kGroups == 2 * kSteps);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&from)[4] = values[2 * step + i / 2];
      a[step][i] = pack<Half>(from[i % 2 * 2], from[i % 2 * 2 + 1]);
    }
  }
}

}  // namespace ladon::cuda::hopper
