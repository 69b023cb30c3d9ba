// The threads of Hopper's backward kernel that add dq up in global memory.
//
// Blocks of keys add to a tile of rows in a fixed order, the last keys first: each waits for its
// turn. Blocks take their keys in that order too, so that those which a block waits for have
// started before it. An addition takes about 3 us until the next block may add, longer than a tile
// of rows, so that a few threads have the tiles in turns.
#pragma once

#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

template <class Shape>
class DqWriter {
 public:
  using Memory = BackwardMemory<Shape>;

  __device__ __forceinline__ DqWriter(const HopperBackwardParams& params, Memory& memory,
                                      int writer)
      : params_(params), memory_(memory), barriers_(memory.dq_barriers[writer]), skipped_(writer) {}

  __device__ __forceinline__ void run() {
    while (true) {
      memory_.own_barriers.full.wait(works_.filled());
      const BackwardWork& work = memory_.works[works_.stage()];
      if (!work.exists) return;
      // The work itself may be gone before the last addition is over.
      const TileWalk<true> walk = work.walks[0];
      const TileRange met = work.met;
      memory_.own_barriers.empty.arrive();
      works_.advance();
      write(walk, met);
    }
  }

 private:
  __device__ __forceinline__ void write(const TileWalk<true>& walk, const TileRange& met) {
    const BackwardParams& params = params_.backward;
    const std::int32_t block = walk.own_tile / kBlockTiles;
    for (std::int32_t head = 0; head < walk.num_heads; ++head) {
      for (std::int32_t tile = met.begin; tile < met.end; ++tile) {
        if (skipped_-- != 0) continue;
        skipped_ = kDqWriters - 1;
        const std::int32_t turn = end_of_blocks(params.call.rules, walk.sequence, tile) - 1 - block;
        add((walk.first_head + head) * params.num_row_tiles + walk.row_tile_start + tile,
            static_cast<unsigned>(turn));
      }
    }
  }

  /// The first of a tile's blocks stores.
  __device__ __forceinline__ void add(std::int64_t tile, unsigned turn) {
    constexpr int kBytes = sizeof memory_.dq;
    unsigned* const turns = params_.dq_turns + tile;
    float* const to = params_.dq_sums + tile * (kBytes / 4);
    const std::uint32_t from = shared_address(memory_.dq);
    wait_for_turn(turns, turn);
    barriers_.full.wait(buffer_.filled());
    if (turn == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
                   "r"(from), "r"(kBytes)
                   : "memory");
    } else {
      asm volatile(
          "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
          "r"(from), "r"(kBytes)
          : "memory");
    }
    commit_stores();
    finish_reading();
    barriers_.empty.arrive();
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async;" ::: "memory");
    asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(turns), "r"(turn + 1) : "memory");
    buffer_.advance();
  }

  __device__ __forceinline__ static void wait_for_turn(const unsigned* turns, unsigned turn) {
    unsigned now;
    do {
      asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(turns) : "memory");
    } while (now != turn);
    asm volatile("fence.proxy.async;" ::: "memory");
  }

  const HopperBackwardParams& params_;
  Memory& memory_;
  BufferBarriers& barriers_;
  int skipped_;  // tiles of the other writers before the next
  WorkPosition works_;
  RingPosition<1> buffer_;
};

}  // namespace ladon::cuda::hopper
