// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 128
// or keys up to 192 with values up to 128, with a scale and a window as the only rules (sinks and
// lse included).
//
// A block of threads owns tiles of 128 query rows: tokens of one query head, or of several that
// share a KV head. One thread copies (Q once, then K and V in blocks of 64 keys, through rings of
// buffers); two warpgroups of 64 rows compute, block by block:
//   S = Q K^T, 64 x 64 in 32 registers a thread, twice
//   P = exp(S - maximum), 16 registers, twice; O += P V, 64 x 128 in 64 registers
// While the softmax of a block runs, the scores of the next one and the weighted sums of the one
// before are under way; a tile's first scores are computed while the results of the tile before are
// stored. Most blocks raise no row's maximum, so weights are computed before it is known whether
// one does (weigh_below()): no maxima, no exchange between lanes.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments of 512, sums and folds (mostly by the same code; forward_weights.cuh has the rest), so a
// row has the same bits from both kernels. Tiles whose sums come out infinite or NaN are marked,
// and computed again by the careful kernel there.
//
// At head_dim 128 a block is 1024 cycles of tensor cores, 768 + 256 of the shared memory's port
// (products and copies), 512 of exponentials; a fold, every eighth block, is 1024 more of the port.
//
// H200, bf16, TFLOP/s of 15 launches (1.78 GHz) and of 0.25 s (1.55 GHz: the power limit), cuDNN's
// in the same run: B16 H16 S1024 D128 causal 369, 351 (399, 357); B4 H16 S4096 causal 554, 503
// (560, 514) and full 596, 543 (663, 606); B1 H16 S16384 causal 634, 566 (628, 570); B2 H32/8 S8192
// causal 617, 550 (627, 559); D64 B1 H32 S16384 causal 381, 382 (469, 443); 192/128 B1 H128 S4096
// causal 584, 526 (593, 538). By the first and the third, a tile takes about 9000 clocks beside its
// blocks, which is why short sequences are slow.
//
// Lost: scores of two blocks by one product, with nothing under way behind the second's softmax
// (D128 2 to 4 % less, D64 4 % more); buffers of one block of keys where there is room for two
// (D128 3 % less); weighted sums before the next scores (15 % less); the next scores beside a fold
// (only with 240 registers, and 24 for the thread that copies, which spills: 25 % less); weights by
// weigh_any() alone in a tile's first and last block (4 % less); queries prefetched to L2
// (nothing); warpgroups in turns (named barriers; 10 % less); sums of earlier segments in registers
// (they spill). Without folds 8 % more, without copies 10 % more when the power is at its limit.
// 256 columns, with those sums in global memory, spilled and gave unstable results at 425.
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
