// The backward pass on Hopper, bf16 heads up to 128 (padded with zeros to 64 or 128) with a scale
// and a window: one kernel for dk and dv, which owns keys, and one for dq, which owns rows.
//
//   own keys:  S^T = K Q^T,  dP^T = V dO^T,  dV += P^T dO,  dK += dS^T Q
//   own rows:  S = Q K^T,    dP = dO V^T,    dQ += dS K
//
// A block has a warp that copies and a warpgroup for each of its own tiles of 64: two at 128
// columns, where a thread has 128 sums of dk and dv and 64 scores, three at 64. Own tiles stay in
// shared memory; the tiles of 64 that they meet come through a ring. P and dS are where the A
// operand of the next product wants them. While one warpgroup turns scores into gradients, the
// products of the others run. Blocks take tickets, so that the next own tiles and the tiles that
// they meet are copied while the last results are stored.
//
// Every step is the arithmetic of backward_mma.cuh in the same order, so a result has the same
// bits from both. Tiles that meet NaN or infinity are left to the careful kernels there.
//
// A tile of 64 x 64 by 128 columns is 1024 cycles of tensor cores for dk and dv, 768 of the shared
// memory's port, and about 300 instructions a warp for P and dS; for dq 768 and 640. Scores are
// computed twice: 7 products in place of 5, which is what one pass that adds dq up in global memory
// would save.
// H200, bf16, 15 launches, B4 H16 S4096: D128 341 TFLOP/s causal and 381 full (5 products counted),
// D64 224 and 288; S16384 D128 causal 401: 0.7x of cuDNN, 2.0x of the generic kernels. Tensor cores
// are busy for 52 to 67 % of the time at D128.
//
// Tried and lost: scores of the next tile started before the sums of this one are waited for (10 %
// slower, registers), warpgroups in turns by named barriers (dq 4 % faster, dk and dv 1 % slower, 6
// % slower at D64), a block for each own tiles (12 % slower at S1024). dO of own rows in registers:
// ptxas 13.0 puts what dS is rounded to in the same registers, though the loop needs both.
#pragma once

#include "cuda/hopper/backward_consumer.cuh"
#include "cuda/hopper/backward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kColumns, bool kOwnKeys>
__global__ void __launch_bounds__((BackwardMemory<kColumns, kOwnKeys>::kThreads), 1)
    backward_wgmma(const __grid_constant__ HopperBackwardParams params) {
  using Memory = BackwardMemory<kColumns, kOwnKeys>;
  extern __shared__ unsigned char shared[];
  // Dynamic shared memory need not start at a multiple of 1024, which the swizzle counts from.
  auto& memory = *reinterpret_cast<Memory*>((reinterpret_cast<std::uintptr_t>(shared) + 1023) &
                                            ~std::uintptr_t{1023});
  if (threadIdx.x == 0) {
    const auto init = [](BufferBarriers& barriers) {
      barriers.full.init(1);
      barriers.empty.init(Memory::kOwnTiles * kGroupThreads / 32);
    };
    init(memory.own_barriers);
    for (BufferBarriers& barriers : memory.barriers) init(barriers);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_registers<kColumns == 128 ? 40 : 32>();
    if (threadIdx.x < 32) BackwardProducer<kColumns, kOwnKeys>(params, memory).run();
  } else {
    take_registers<kColumns == 128 ? 232 : 160>();
    BackwardConsumer<Half, kColumns, kOwnKeys>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
