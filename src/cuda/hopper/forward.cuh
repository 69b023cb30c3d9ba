// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 256.
// The kernels of kWindow have a positive scale and a window as the only rules (sinks and lse
// included), those of kAll every rule.
//
// A block of threads owns tiles of 128 query rows, 192 where heads are up to 64: tokens of one
// query head, or of several that share a KV head. One thread copies (Q once, then K and V in blocks
// of 64 keys, through rings of buffers); two or three warpgroups of 64 rows compute, block by
// block:
//   S = Q K^T, 64 x 64 in 32 registers a thread
//   P = exp(S - maximum), 16 registers; O += P V, 64 x 128 in 64 registers
// A tile's first scores are computed while the results of the tile before are stored. Most blocks
// raise no row's maximum, so weights are computed before it is known whether one does
// (weigh_below()): no maxima, no exchange between lanes.
//
// There are two schedules for kWindow because registers decide. With heads of 128 a warpgroup holds
// the scores of two blocks (forward_pairs.cuh): the next scores and the last weighted sums are
// under way behind each softmax. O of 256 columns, or three warpgroups of 160 registers, leave
// space for one (forward_blocks.cuh): the weighted sums alone are under way, and the others'
// products. For heads of 64 three warpgroups so are 18 % more than two with pairs, and queries in
// registers another 4 to 5 %: the shared memory's port has less to deliver. With all rules every
// shape takes its blocks one by one (forward_ruled_blocks.cuh): they need the registers of a second
// block. Their scores are in natural units, and where there is dropout, all weights are computed by
// weigh_any().
//
// How long rules take at least, at head_dim 128, compared with 1024 cycles of tensor cores for a
// block of keys: 1536 for softcap (three results of the special function units for each score,
// instead of one). Dropout takes 8 blocks of Philox for a thread's 32 weights, about 500
// instructions.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments, sums and folds (mostly by the same code; forward_weights.cuh has the rest), so a row
// has the same bits from both kernels. Tiles whose sums come out infinite or NaN are marked, and
// computed again by the careful kernel there.
//
// At head_dim 128 a block is 1024 cycles of tensor cores, 768 + 256 of the shared memory's port
// (products and copies), 512 of exponentials; a fold, every eighth block, is 1024 more of the port.
// With pairs the next scores are under way behind it. Heads above 192 have the sums of earlier
// segments in global memory.
//
// H200, bf16, TFLOP/s of bursts, cuDNN in brackets: B16 H16 S1024 D128 causal 340 (438); B4 H16
// S4096 causal 547 (590) and full 601 (686); B1 H16 S16384 causal 646 (647); B2 H32/8 S8192 causal
// 618 (648); D64 B1 H32 S16384 causal 452 (472); D256 B1 H8 S16384 causal 518 (666). 192/128 B1
// H128 S4096 causal 612 (611), with folds that read four groups of columns at a time, not eight.
// With folds before the next scores are started: 341, 536, 588, 631 and 608 in the first five, and
// 569 for 192/128 with segments of 512 keys. Two earlier runs of that form had more (S1024 375,
// S4096 566 and 603, S16384 647, 192/128 594) with the same figures of cuDNN.
//
// Segments of 1024 keys give 340, 574, 635, 684 and 654 (the D128 cases in this order), D64 471 and
// D256 617; of 2048 keys 343, 591, 656, 707, 674, 485 and 687. But then decoding one sequence takes
// up to four times as long (docs/gpu_results.md).
//
// At B16 H16 S1024 a tile takes about 9000 cycles besides its blocks (clocks of one warpgroup):
// 2300 store the tile before, 2000 finish the rows, 1700 are the first softmax, 1200 wait for
// queries (2900 before the next tile was worked out ahead), 900 set up the rules. In one loop over
// the blocks of all tiles, with a tile's first scores alongside the last weighted sums of the one
// before, ptxas 13.0 serialises the products (C7511), though no register is spilled.
//
// Lost: queries in registers with heads of 128 (a quarter of them 1 to 3 % less, five eighths 4 to
// 6 %, all 3 to 12 %, with spills); scores of two blocks by one product (m64n128k16), with the
// weighted sums of two blocks behind their softmax and warpgroups in turns (named barriers): D128 2
// to 5 % less with segments of 512, the same with 1024; without turns less. Turns with heads of 64:
// 3 % less. Queries in two buffers (2 % more at S1024, if there were space next to the earlier
// sums); buffers of one block of keys where there is space for two (D128 3 % less); weighted sums
// before the next scores (15 % less); folds that read all groups at once alongside the next scores
// (spills), or four instead of eight (1 % less, S1024 3 %); results stored through shared memory (1
// % less); weights by weigh_any() alone in a tile's first and last block (4 % less); queries
// prefetched to L2 (nothing); sums of earlier segments in registers (they spill), and of heads of
// 128 in global memory (12 % less). Without folds 8 % more (when no scores were behind them),
// without copies 10 % more when the power is at its limit.
#pragma once

#include "cuda/hopper/forward_consumer.cuh"
#include "cuda/hopper/forward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue, ForwardRules kRules>
__global__ void __launch_bounds__(ForwardShape<kHead, kValue, kRules>::kThreads, 1)
    forward_wgmma(const __grid_constant__ HopperForwardParams params) {
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kConsumers * kGroupThreads / 32;
    const auto init = [](BufferBarriers& barriers) {
      barriers.full.init(1);
      barriers.empty.init(kWarps);
    };
    for (BufferBarriers& barriers : memory.query_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.key_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.value_barriers) init(barriers);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) ForwardProducer<kHead, kValue, kRules>(params, memory).run();
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ForwardConsumer<Half, kHead, kValue, kRules>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
