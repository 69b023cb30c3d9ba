// Absorbed latent attention (MLA) on Hopper's tensor cores, for q and latents of one 16-bit dtype:
// keys of 512 to 576 columns, the first 512 of which are the values too, with a scale and a window
// as the only rules (sinks and lse included).
//
// A block of threads takes tasks: 64 query rows (token, head) over a part of a sequence's keys, in
// blocks of 64 latents that the copy engine brings to one of three buffers (64 KiB each; the last
// 64 columns have one of their own). One warpgroup computes scores and weights, two sum:
//   S = Q K^T, 64 x 64 in 32 registers a thread; 7/9 of Q in 112 registers, the rest in 16 KiB
//   P = exp(S - maximum), by way of 8 KiB of shared memory to the others
//   O += P V, 64 x 256 in 128 registers a thread of each; V is the tile that was K
// 184 and 160 registers, 226 KiB of shared memory, one block of threads a multiprocessor.
//
// Every step is the arithmetic of forward_mma.cuh in the same order (ForwardScores is the same
// code), so a row has the same bits from both kernels. The first part of a sequence folds its
// segments, with the sums of earlier ones in global memory; other parts write them for
// fold_partials(). Tasks whose sums come out infinite or NaN are marked, and their tiles computed
// again (forward_finish.h).
//
// A block of keys is 2176 cycles of tensor cores. The scores of a block run alone, then the sums of
// it beside the softmax of the next: 3000 cycles were expected. A fold moves 256 KiB through the L2
// cache: 12000 cycles every 8 blocks when all multiprocessors fold, which is the largest loss.
// H200, bf16, latents of 512 + 64, in one run with cuBLAS at 795 TFLOP/s and a copy at 4.25 TB/s:
// 64 sequences of 4096, 128 heads 217 us = 335 TFLOP/s; 16 heads 153 us = 2.0 TB/s; 32 of 8192, 128
// heads 304 us (the generic kernels: 2210 us); one of 8192, 128 heads 48 us.
//
// A copy takes about 130 cycles to start: with one for each 64 columns a block took 5700 cycles.
#pragma once

#include "cuda/hopper/latent_scores.cuh"
#include "cuda/hopper/latent_sums.cuh"
#include "cuda/queue.h"

namespace ladon::cuda::hopper {

template <class Half>
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_wgmma(const __grid_constant__ LatentParams params) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<LatentMemory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (Barrier& barrier : memory.latents_full) barrier.init(1);
    memory.rope_barriers.full.init(1);
    memory.rope_barriers.empty.init(kWarps);
    memory.weights_barriers.full.init(kWarps);
    memory.weights_barriers.empty.init(2 * kWarps);
    publish_barriers();
    prefetch_map(params.latents);
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    take_registers<184>();
    LatentScores<Half>(params, memory).run();
  } else {
    give_registers<160>();
    LatentSums<Half>(params, memory).run();
  }
}

template <class Half>
void launch_latent(Queue& queue, int blocks, const LatentParams& params) {
  constexpr std::size_t kAlignment = 1024;
  const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kLatentThreads),
                  sizeof(LatentMemory) + kAlignment};
  queue.launch(latent_wgmma<Half>, grid, params);
}

}  // namespace ladon::cuda::hopper
