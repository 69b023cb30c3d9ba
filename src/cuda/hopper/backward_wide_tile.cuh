// Tiles of Hopper's backward kernels for heads up to 256: what a block owns, and what the threads
// of the two kernels (backward_wide_keys.cuh, backward_wide_rows.cuh) do alike.
#pragma once

#include <cstdint>

#include "cuda/hopper/backward_producer.cuh"
#include "cuda/hopper/backward_rows.cuh"
#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

using backward::Band;

/// 64 rows of an operand.
struct WideTile {
  static constexpr int kRows = kTile;
  static constexpr int kBoxBytes = kRows * kBoxRowBytes;
  alignas(1024) unsigned char boxes[WideShape::kHeadColumns / kBoxColumns][kBoxBytes];
};

/// P or dS of the own tile with another one, in the layout of accumulators, and rounded.
using WideScores = float[kTile / 8][4];
using WideOperand = std::uint32_t[kTile / 16][4];

/// Both kernels have a warpgroup that copies and two that compute. Two warps copy: the first the
/// own tiles and one operand of the others, the second the other operand.
inline constexpr int kWideWarps = 2 * kGroupThreads / 32;  // that compute
inline constexpr int kWideProducerRegisters = 40;
inline constexpr int kWideConsumerRegisters = 232;

/// Where a sequence begins in the tensor maps.
struct FirstRows {
  std::int32_t q;
  std::int32_t k;
  std::int32_t v;
  std::int32_t dout;
};
/// A function of its own, because the producer has few registers.
__device__ __noinline__ inline void find_first_rows(const AttentionParams& call,
                                                    const Sequence& sequence, FirstRows& rows) {
  rows.q = static_cast<std::int32_t>(sequence.q / call.q.token_stride);
  rows.k = static_cast<std::int32_t>(sequence.k / call.k.token_stride);
  rows.v = static_cast<std::int32_t>(sequence.v / call.v.token_stride);
  rows.dout = static_cast<std::int32_t>(sequence.dout / call.dout.token_stride);
}

/// Enough for all positions of a sequence.
inline constexpr std::int64_t kFarthest = std::int64_t{1} << 30;

/// In the first warp that copies: takes tickets and announces their works, which find(ticket, work)
/// finds; copy(work) copies the tiles of one that meets any.
template <class Memory, class Find, class Copy>
__device__ __forceinline__ void announce_works(const HopperBackwardParams& params, Memory& memory,
                                               const Find& find, const Copy& copy) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  WorkPosition works;
  const auto announce = [&](int bytes) {
    memory.own_barriers.empty.wait(works.emptied());
    __syncwarp();
    if (lane == 0) memory.own_barriers.full.arrive_expecting(bytes);
    works.advance();
  };
  int ticket = static_cast<int>(blockIdx.x);
  while (ticket < params.tickets) {
    auto& work = memory.works[works.stage()];
    const bool exists = lane == 0 && find(ticket, work);
    __syncwarp();
    if (__any_sync(0xffffffffU, exists) != 0) {
      const bool is_empty = work.walk.num_steps() == 0;
      announce(is_empty ? 0 : Memory::kOwnBytes);
      if (!is_empty) copy(work);
    }
    int next = 0;
    if (lane == 0) {
      next = static_cast<int>(gridDim.x + atomicAdd(params.backward.next_ticket, 1U));
    }
    ticket = uniform(next);
  }
  memory.works[works.stage()].exists = false;
  announce(0);
}

/// In the second: copy(work) for each work that meets any tile.
template <class Memory, class Copy>
__device__ __forceinline__ void follow_works(Memory& memory, const Copy& copy) {
  WorkPosition works;
  while (true) {
    memory.own_barriers.full.wait(works.filled());
    const auto& work = memory.works[works.stage()];
    if (!work.exists) return;
    if (work.walk.num_steps() != 0) copy(work);
    __syncwarp();
    if (threadIdx.x % 32 == 0) memory.own_barriers.empty.arrive();
    works.advance();
  }
}

/// In each warpgroup that computes: compute(work), which releases the own tiles.
template <class Memory, class Compute>
__device__ __forceinline__ void compute_works(Memory& memory, const Compute& compute) {
  WorkPosition works;
  while (true) {
    memory.own_barriers.full.wait(works.filled());
    const auto& work = memory.works[works.stage()];
    if (uniform(work.exists ? 1 : 0) == 0) return;
    compute(work);
    works.advance();
  }
}

/// Fills the buffer of a ring with the rows of a tile. For all lanes of a warp; store() writes what
/// else readers find there.
template <class Store>
__device__ __forceinline__ void copy_tile(WideTile& to, BufferBarriers& barriers, unsigned emptied,
                                          const CUtensorMap& map, std::int32_t first_row,
                                          std::int32_t head, const Store& store) {
  barriers.empty.wait(emptied);
  store();
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    barriers.full.arrive_expecting(sizeof to);
    copy_boxes(to.boxes, map, first_row, head, barriers.full);
  }
}

/// A warp that computes is done with a buffer, or has filled it.
__device__ __forceinline__ void arrive_as_warp(Barrier& barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier.arrive();
}

/// Sets the rows of a tile without their bit to 0, for the products of this warpgroup; `barrier` is
/// its own. The other warpgroup does the same where it reads the tile, and stores the same zeros.
__device__ __forceinline__ void zero_dead_rows_alone(WideTile& tile, std::uint64_t live,
                                                     int barrier) {
  if (uniform(live != ~std::uint64_t{0} ? 1 : 0) == 0) return;
  zero_dead_rows(tile, live, static_cast<int>(fresh(threadIdx.x)) % kGroupThreads, kGroupThreads);
  sync_threads(barrier, kGroupThreads);
}

/// Barriers of a buffer that the producers' copies fill.
__device__ __forceinline__ void init_barriers(BufferBarriers& barriers, int writers, int readers) {
  barriers.full.init(writers);
  barriers.empty.init(readers);
}

}  // namespace ladon::cuda::hopper
