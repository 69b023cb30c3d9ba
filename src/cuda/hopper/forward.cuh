// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 128
// or keys up to 192 with values up to 128, with a scale and a window as the only rules (sinks and
// lse included).
//
// A block of threads owns tiles of 128 query rows: tokens of one query head, or of several that
// share a KV head. One thread copies (Q once, then K in pairs of blocks of 64 keys and V in blocks,
// through rings of buffers); two warpgroups of 64 rows compute:
//   S = Q K^T of a pair, 64 x 128 in 64 registers a thread
//   P = exp(S - maximum) of each block in turn, 16 registers; O += P V, 64 x 128 in 64 registers
// The softmax of a block runs while the products of the one before are under way, and a tile's
// first scores are computed while the results of the tile before are stored. Most blocks raise no
// row's maximum, so weights are computed before it is known whether one does
// (weigh_below()): no maxima, no exchange between lanes.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments of 512, sums and folds (mostly by the same code; forward_weights.cuh has the rest), so a
// row has the same bits from both kernels. Tiles whose sums come out infinite or NaN are marked,
// and computed again by the careful kernel there.
//
// At head_dim 128 a pair is 2048 cycles of tensor cores, 1280 + 512 of the shared memory's port
// (products and copies), 1024 of exponentials; a fold, every fourth pair, is 1024 more of the port.
//
// H200, bf16, TFLOP/s of 15 launches (1.78 GHz) and of 0.25 s (1.55 GHz: the power limit), cuDNN's
// in the same run: B16 H16 S1024 D128 causal 350, 338 (402, 402); B4 H16 S4096 causal 536, 489
// (554, 516) and full 580, 527 (660, 600); B1 H16 S16384 causal 627, 557 (626, 554); B2 H32/8 S8192
// causal 602, 538 (627, 554); D64 B1 H32 S16384 causal 395, 393 (469, 441); 192/128 B1 H128 S4096
// causal 570, 514 (592, 532).
//
// Clocks of a warpgroup, before maxima were left out: a pair 3140, of which its two softmaxes 1950;
// a fold 1100 more; 7000 a tile beside its pairs, in code that runs once a tile.
// Lost: warpgroups in turns (named barriers), with the softmax of a block or of a pair at once, 10
// % less than without; sums of earlier segments in registers (they spill); one loop body for all
// pairs (the products are serialised). Without folds 8 % more, without copies 10 % more when the
// power is at its limit. 256 columns, with those sums in global memory and blocks one by one,
// spilled and gave unstable results at 425.
#pragma once

#include "cuda/hopper/forward_consumer.cuh"
#include "cuda/hopper/forward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_wgmma(const __grid_constant__ HopperForwardParams params) {
  using Memory = ForwardMemory<kHead, kValue>;
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = kConsumers * kGroupThreads / 32;
    const auto init = [](BufferBarriers& barriers) {
      barriers.full.init(1);
      barriers.empty.init(kWarps);
    };
    init(memory.query_barriers);
    for (BufferBarriers& barriers : memory.key_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.value_barriers) init(barriers);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<40>();
    if (threadIdx.x == 0) ForwardProducer<kHead, kValue>(params, memory).run();
  } else {
    take_registers<232>();
    ForwardConsumer<Half, kHead, kValue>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
