// The backward pass on Hopper, bf16 with a scale and a window, in one pass over the scores: heads
// up to 128 (padded with zeros to 64 or 128), or up to 192 with values up to 128.
//
//   S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q,  dQ = dS K
//
// A block owns 128 keys, 64 for each of two warpgroups, which stay in shared memory; tiles of 64
// rows of q and dout come through a ring. P^T and dS^T are where the A operand of dV and dK wants
// them. dS goes through shared memory, because dQ is over the keys of both warpgroups; each
// computes half of its columns, a tile later (backward_dq_products.cuh). Threads of the warpgroup
// that copies add dQ to sums in global memory by bulk reductions, block of keys after block of keys
// in a fixed order (backward_dq_writer.cuh), and a second kernel rounds the sums
// (backward_finish.cuh). Blocks take tickets, so that the next own tiles and the tiles that they
// meet are copied while the last results are stored.
//
// Every step is the arithmetic of backward_mma.cuh in the same order, so a result has the same
// bits from both. The careful kernels there compute tiles that meet NaN or infinity once more; a
// warpgroup looks for them in its own keys when they have come.
//
// At 128 columns: 232 registers, 197 KB of shared memory. A tile of rows is 2560 cycles of tensor
// cores and about 2950 of the shared memory's port (products 2048, copies 256, dS and dQ written
// and read 640); it takes 4600. Where they go, by clock marks at S16384: S and dP 1100, P and dS
// 1070, the products of dV, dQ and dK 1150, dS and dQ to shared memory 830.
//
// At 192 and 128 columns: 232 registers, of which dK and dV take 160, and 222 KB. Rows come in
// stages of 32, whose scores are all that fits next to them, and dQ in two parts, one with each
// stage of the next tile, stored while the products of dK run (2 % faster than after them at
// S16384 and full, 1 % slower at H128). 3328 cycles of tensor cores for 64 rows, about 4600 of the
// port (S and dP as 64 x 32 read half as much again as 64 x 64 would); about 6500 by the time at
// S16384.
//
// H200, bf16, 15 launches, TFLOP/s of five products with the statistics of rows, and of cuDNN
// twice in the same run: D128 causal B16 H16 S1024 282, cuDNN 316 and 290; B4 H16 S4096 439, 484
// and 440; B1 H16 S16384 462, 564 and 521; full B4 H16 S4096 437, 550 and 521. 192/128 causal B1
// H128 S4096 431, 464 and 415; B1 H16 S16384 453, 501 and 489; full B2 H16 S4096 425, 294 and 289.
// Statistics of rows that are read before a stage is free, and not after: 1 to 2 % more at S4096
// causal (440 and 446). Before the look at keys and the statistics of rows took less: GQA 32/8 B2
// S8192 causal 434 and 512; D64 causal S4096 275 and 366, S16384 378 and 452, full 335 and 449. Of
// 610 us at S1024 the statistics of rows have 51, the rounding of dq about 50. Adding dq in any
// order instead: 1 to 2 % faster at D128 causal, 3 % full.
//
// Tried and lost: warpgroups in turns by named barriers, one with its softmax while the products of
// the other run (418 in place of 494 at S16384: what has to be waited for within a turn is too
// long); at 128 columns, scores of the next tile started before dk is waited for, S alone as well,
// and the products of dq before those of dv (as at 64 columns; serialised for want of registers);
// heads one after the other without a mask (390 in place of 448: blocks of a head wait for each
// other's additions); dq rounded in the last block of its turns by the warps that add it up (244 us
// more at S4096, for a kernel of 49: those blocks are the last of all); the first tiles that a
// block meets copied before its keys (2 % slower). f16: P and dS have units there that follow the
// largest of each 32 columns (FragmentSums). Those of dq would need the maximum over the keys of
// several warps, and change within a block of keys, which one product cannot follow: the same bits
// as the generic kernels' take another rule for units first.
#pragma once

#include "cuda/hopper/backward_consumer.cuh"
#include "cuda/hopper/backward_dq_writer.cuh"
#include "cuda/hopper/backward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, class Shape>
__global__ void __launch_bounds__(kBackwardThreads, 1)
    backward_wgmma(const __grid_constant__ HopperBackwardParams params) {
  using Memory = BackwardMemory<Shape>;
  constexpr bool kNarrow = Shape::kHeadColumns == 64;
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = kBlockTiles * kGroupThreads / 32;
    const auto init = [](BufferBarriers& barriers, int writers, int readers) {
      barriers.full.init(writers);
      barriers.empty.init(readers);
    };
    init(memory.own_barriers, 1, kWarps + kDqWriters);
    for (BufferBarriers& barriers : memory.barriers) init(barriers, 1, kWarps);
    for (BufferBarriers& barriers : memory.dscores_barriers) init(barriers, kWarps, kWarps);
    for (BufferBarriers& barriers : memory.dq_barriers) init(barriers, kWarps, 1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<kNarrow ? 56 : 40>();
    if (threadIdx.x < 32) {
      BackwardProducer<Shape>(params, memory).run();
    } else if (threadIdx.x % 32 == 0) {
      DqWriter<Shape>(params, memory, static_cast<int>(threadIdx.x) / 32 - 1).run();
    }
  } else {
    take_registers<kNarrow ? 224 : 232>();
    BackwardConsumer<Half, Shape>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
