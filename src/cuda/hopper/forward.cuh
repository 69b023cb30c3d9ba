// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 256.
// The kernels of kWindow have a positive scale and a window as the only rules (sinks and lse
// included), those of kAll every rule.
//
// A block of threads owns tiles of 192 query rows, 128 where heads are above 192, or above 64 with
// rules: tokens of one query head, or of several that share a KV head. One thread works out what
// the tiles are (forward_planner.cuh), one copies (Q once, then K and V in blocks of 64 keys,
// through rings of buffers); three or two warpgroups of 64 rows compute, block by block:
//   S = Q K^T, 64 x 64 in 32 registers a thread
//   P = exp(S - maximum), 16 registers; O += P V, 64 x 128 in 64 registers
// A tile's first scores are computed while the results of the tile before are stored. Most blocks
// raise no row's maximum, so weights are computed before it is known whether one does
// (weigh_below()): no maxima, no exchange between lanes.
//
// While the softmax of a block runs, the weighted sums of the one before are under way, and the
// products of the other warpgroups (forward_blocks.cuh). Three warpgroups have 160 registers each:
// enough for O of up to 128 columns, where what a thread's rows see is found anew in each masked
// block. Queries stay in registers at heads of 64 (4 to 5 %: the shared memory's port has less to
// deliver). With all rules blocks have another schedule (forward_ruled_blocks.cuh): they need the
// registers of the second weights. Their scores are in natural units, and where there is dropout,
// all weights are computed by weigh_any().
//
// Two warpgroups with the scores of two blocks each in registers, so that the next scores are under
// way behind a softmax too, were what heads of 65 to 192 had before: three are faster by 18 % at
// heads of 64 and, at heads of 128, by 1 % at S1024, 1 to 2 % at S4096, 3 to 5 % at S16384, 7 %
// with GQA and full, 11 % with a window of 1024; 0 and 7 % in two runs at 192/128.
//
// How long rules take at least, at head_dim 128, next to 1024 cycles of tensor cores for a block of
// keys and 128 rows: 1536 for softcap (three results of the special function units for each score,
// instead of one). Dropout takes 8 blocks of Philox for a thread's 32 weights, about 500
// instructions.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments, sums and folds (mostly by the same code; forward_weights.cuh has the rest), so a row
// has the same bits from both kernels. Tiles whose sums come out infinite or NaN are marked, and
// computed again by the careful kernel there.
//
// At head_dim 128 a block is 1536 cycles of tensor cores for 192 rows, 1152 + 256 of the shared
// memory's port (products and copies), 768 of exponentials; a fold, every eighth block, is 1536
// more of the port. 160 registers, 225 KiB of shared memory, 96 of which are sums of earlier
// segments. Heads above 128 (with rules above 192) have them in global memory.
//
// What it reaches is in docs/gpu_results.md. A tile of B16 H16 S1024 D128 causal takes 20,900
// cycles (clocks of each warpgroup): 14,700 its 8.5 blocks, 1300 wait for queries, 2000 store the
// tile before behind the first scores, 1300 are the first softmax, 1700 fold and finish. With tiles
// cut from a sequence's start, one thread that plans and copies, masks that compare both edges of a
// window, and rows stored by threads it was 20 % slower: the cut is 4 % of that (2 % at S4096), the
// second thread 5 % (a plan takes some thousand cycles of a thread, in which nothing was copied),
// the masks 4 %, the copy engine's stores 2 to 3 %. At S16384 nothing changed.
//
// Heads up to 128 have segments of 512 keys. Of 1024, measured with pairs of blocks at heads of 128
// (340, 547, 601, 646 and 618 with 512 in the first five on that machine), they give 340, 574, 635,
// 684 and 654, D64 471 (452); of 2048 keys 343, 591, 656, 707, 674 and 485. But then decoding one
// sequence takes up to four times as long (docs/gpu_results.md).
//
// A tile of 128 rows by pairs of blocks took about 7000 cycles apart from its blocks (B16 H16
// S1024, clocks of one warpgroup): 1700 store the tile before, 700 to 1000 finish the rows, 1000
// fold the last segment, 1250 are the first softmax, 500 start the first products, 400 set up the
// rules. It is the number of instructions that counts: two warps of a scheduler issue one each 5.7
// cycles. Rows that are finished and stored through shared memory by fewer instructions gave S1024
// 7 to 8 % more, windows of 1024 5 %, S4096 3 %, S16384 2 %. Stored so by bulk copies, a row each,
// S1024 has 1 % less: 16 lanes issue theirs one after the other. In one loop over the blocks of all
// tiles, with a tile's first scores during the last weighted sums of the one before, ptxas 13.0
// serialises the products (C7511), though no register is spilled.
//
// Lost, with three warpgroups: the next scores started before a fold or a rescale (4 % less at
// heads of 128, which spill); queries copied and released for each warpgroup by itself (nothing);
// queries prefetched to L2 (1 % less); tiles planned two ahead (S16384 8 % less: who is free first
// no longer gets the next tile).
//
// Lost, with two warpgroups and pairs of blocks at heads of 128: queries in registers (a quarter of
// them 1 to 3 % less, five eighths 4 to 6 %, all 3 to 12 %, with spills); scores of two blocks by
// one product (m64n128k16), with the weighted sums of two blocks behind their softmax and
// warpgroups in turns (named barriers): D128 2 to 5 % less with segments of 512, the same with
// 1024; without turns less. Turns with heads of 64: 3 % less. Queries in two buffers (2 % more at
// S1024, if there were space next to the earlier sums); weighted sums before the next scores (15 %
// less); folds that read all groups at once during the next scores (spills), or four instead of
// eight (1 % less, S1024 3 %); queries copied for each warpgroup by itself, so that one could be
// further than the other (2 to 3 % less); weights by weigh_any() alone in a tile's first and last
// block (4 % less); queries prefetched to L2 (nothing); sums of earlier segments in registers (they
// spill), and of heads of 128 in global memory (12 % less). With heads of 256, whose sums are
// there, copies of eight groups ahead through shared memory in place of four at once to registers:
// 0 and 8 % less; L2 is the limit. Without folds 8 % more (when no scores were behind them),
// without copies 10 % more when the power is at its limit.
#pragma once

#include "cuda/hopper/forward_consumer.cuh"
#include "cuda/hopper/forward_planner.cuh"
#include "cuda/hopper/forward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue, ForwardRules kRules>
__global__ void __launch_bounds__(ForwardShape<kHead, kValue, kRules>::kThreads, 1)
    forward_wgmma(const __grid_constant__ HopperForwardParams params) {
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;
  static_assert(sizeof(Memory) + 1024 <= 227 * 1024);
  extern __shared__ unsigned char shared[];
  auto& memory = *reinterpret_cast<Memory*>(aligned_memory(shared));
  if (threadIdx.x == 0) {
    constexpr int kWarps = Shape::kConsumers * kGroupThreads / 32;
    const auto init = [](BufferBarriers& barriers) {
      barriers.full.init(1);
      barriers.empty.init(kWarps);
    };
    memory.plan_barriers.full.init(1);
    memory.plan_barriers.empty.init(1);
    for (BufferBarriers& barriers : memory.query_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.key_barriers) init(barriers);
    for (BufferBarriers& barriers : memory.value_barriers) init(barriers);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<Shape::kProducerRegisters>();
    if (threadIdx.x == 0) ForwardProducer<kHead, kValue, kRules>(params, memory).run();
    if (threadIdx.x == 32) ForwardPlanner<kHead, kValue, kRules>(params, memory).run();
  } else {
    take_registers<Shape::kConsumerRegisters>();
    ForwardConsumer<Half, kHead, kValue, kRules>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
