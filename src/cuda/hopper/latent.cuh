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
// 184 and 160 registers, 226 KiB of shared memory, one block of threads a multiprocessor. Where the
// longest sequence has an even number of tiles, two neighbouring multiprocessors take a pair, and
// each copies half the columns of the latents to both.
//
// Every step is the arithmetic of forward_mma.cuh in the same order (ForwardScores is the same
// code), so a row has the same bits from both kernels. The first part of a sequence folds its
// segments, with the sums of earlier ones in global memory; other parts write them for
// fold_partials(). Tasks whose sums come out infinite or NaN are marked, and their tiles computed
// again (forward_finish.h).
//
// A block of keys is 2176 cycles of tensor cores. The scores of a block are multiplied while the
// one before the last is summed, and sums wait while scores run alone: all that the first
// warpgroup does is one chain, so a warp of those that sum makes the copies. A fold moves 256 KiB
// through the L2 cache; 64 KiB at a time are on their way to the buffer whose block is done with.
// The latents that come to that buffer later are late, so the weights before them do not wait.
// H200, bf16, latents of 512 + 64, two bursts in one run, main memory's speed changes between them:
// 64 sequences of 4096, 128 heads 163 and 162 us = 451 TFLOP/s, 57 % of cuBLAS (786); 16 heads 122
// and 132 us = 2.5 TB/s; 32 of 8192, 128 heads 214 and 259 us; one of 8192, 128 heads 38 us. A fold
// is 6000 cycles, where a block of keys takes 3600; without folds the first is 140 us. The rest of
// the loss is the chain of the first warpgroup: two that each have a block in flight, and half of
// the sums, would break it.
//
// Tried and lost: weights as operands in registers (16 more are not there: products are
// serialised); one more box of queries in registers and two buffers of weights (the same);
// prefetches of later blocks to the L2 cache, by the warpgroup of scores (5 % slower) or by the
// warp that copies (7 %), and of their last columns alone (4 %); the last columns copied after the
// sums and not before them (9 % slower); weights stored before the next scores start (no
// difference); one copy for each 64 columns (130 cycles each); sums that start as soon as their
// weights are there, during scores that run (1 to 4 % slower); latents that wait for a fold brought
// to the L2 cache meanwhile (2 to 3 %); tiles alone instead of pairs (8 %).
#pragma once

#include "cuda/hopper/latent_scores.cuh"
#include "cuda/hopper/latent_sums.cuh"
#include "cuda/queue.h"

namespace ladon::cuda::hopper {

/// kTiles: of a cluster, which share copies.
template <class Half, int kTiles>
__global__ void __cluster_dims__(kTiles, 1, 1) __launch_bounds__(kLatentThreads, 1)
    latent_wgmma(const __grid_constant__ LatentParams params) {
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<LatentMemory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = kGroupThreads / 32;
    for (Barrier& barrier : memory.latents_full) barrier.init(1);
    for (Barrier& barrier : memory.latents_empty) barrier.init(2 * kWarps * kTiles);
    memory.rope_barriers.full.init(1);
    memory.rope_barriers.empty.init(kWarps);
    memory.weights_barriers.full.init(kWarps);
    memory.weights_barriers.empty.init(2 * kWarps);
    memory.may_sum.init(kWarps);
    publish_barriers();
    prefetch_map(params.latents);
  }
  kTiles > 1 ? sync_cluster() : __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    take_registers<184>();
    LatentScores<Half, kTiles>(params, memory).run();
  } else {
    give_registers<160>();
    LatentSums<Half, kTiles>(params, memory).run();
  }
}

template <class Half, int kTiles>
void launch_latent(Queue& queue, int blocks, const LatentParams& params) {
  constexpr std::size_t kAlignment = 1024;
  const Grid grid{dim3(static_cast<unsigned>(blocks)), dim3(kLatentThreads),
                  sizeof(LatentMemory) + kAlignment};
  queue.launch(latent_wgmma<Half, kTiles>, grid, params);
}
template <class Half>
void launch_latent(Queue& queue, int blocks, const LatentParams& params) {
  params.schedule.has_pairs ? launch_latent<Half, 2>(queue, blocks, params)
                            : launch_latent<Half, 1>(queue, blocks, params);
}

}  // namespace ladon::cuda::hopper
