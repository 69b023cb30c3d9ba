// Attention forward on Hopper's tensor cores, for q, k and v of one 16-bit dtype, heads up to 128,
// with a scale and a window as the only rules (sinks and lse included).
//
// A block of threads owns tiles of 128 query rows: tokens of one query head, or of several that
// share a KV head. One thread copies (Q once, then K in pairs of blocks of 64 keys and V in blocks,
// through rings of buffers); two warpgroups of 64 rows compute:
//   S = Q K^T of a pair, 64 x 128 in 64 registers a thread
//   P = exp(S - maximum) of each block in turn, 16 registers; O += P V, 64 x 128 in 64 registers
// The softmax of a block runs while the products of the one before are under way. The next tile's
// queries and first keys are copied while the last blocks of a tile are computed.
//
// Every step is the arithmetic of forward_mma.cuh, in the same order: the same blocks of keys,
// segments of 512, sums and folds (ForwardScores and ForwardSums are the same code), so a row has
// the same bits from both kernels. Tiles whose sums come out infinite or NaN are marked, and
// computed again by the careful kernel there.
//
// At head_dim 128 a pair is 2048 cycles of tensor cores, 1280 + 512 of the shared memory's port
// (products and copies), 1024 of exponentials; a fold, every fourth pair, is 1024 more of the port.
// H200, bf16, B4 H16 S4096 D128, by `ladon bench`: 422 TFLOP/s causal and 426 full, 0.97x and 0.80x
// of cuDNN in the same run; 600 were expected.
//
// Variants, each for 15 launches (the clock is higher then): this one 493 causal, 537 full, 564
// causal at S16384. Without folds 512, 563 and 600; segments of 1024 keys 512, 559 and 601, but
// they would halve the parallelism of decoding one sequence; the softmax of a pair at once 493, 539
// and 546; the same with warpgroups in turns (named barriers) 472, 525 and 567; blocks of 64 keys
// with Q in registers 469, 501 and 534; without the softmax about 650 full.
#pragma once

#include "cuda/hopper/forward_consumer.cuh"
#include "cuda/hopper/forward_producer.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kColumns>
__global__ void __launch_bounds__(kForwardThreads, 1)
    forward_wgmma(const __grid_constant__ HopperForwardParams params) {
  using Memory = ForwardMemory<kColumns>;
  extern __shared__ unsigned char shared[];
  // Dynamic shared memory need not start at a multiple of 1024, which the swizzle counts from.
  auto& memory = *reinterpret_cast<Memory*>((reinterpret_cast<std::uintptr_t>(shared) + 1023) &
                                            ~std::uintptr_t{1023});
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
    if (threadIdx.x == 0) ForwardProducer<kColumns>(params, memory).run();
  } else {
    take_registers<232>();
    ForwardConsumer<Half, kColumns>(params, memory).run();
  }
}

}  // namespace ladon::cuda::hopper
