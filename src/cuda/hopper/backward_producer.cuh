// The warp of Hopper's backward kernel that copies tiles to shared memory.
#pragma once

#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

template <int kColumns>
class BackwardProducer {
 public:
  using Memory = BackwardMemory<kColumns>;
  using Pair = typename Memory::Pair;

  __device__ __forceinline__ BackwardProducer(const HopperBackwardParams& params, Memory& memory)
      : params_(params),
        call_(params.backward.call),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ void run() {
    int ticket = static_cast<int>(blockIdx.x);
    while (ticket < params_.tickets) {
      work_ = &memory_.works[works_.stage()];
      const bool exists = lane_ == 0 && find_work(params_, ticket, *work_);
      if (__any_sync(0xffffffffU, exists) != 0) copy_work();
      int next = 0;
      if (lane_ == 0)
        next = static_cast<int>(gridDim.x + atomicAdd(params_.backward.next_ticket, 1U));
      ticket = uniform(next);
    }
    memory_.works[works_.stage()].exists = false;
    announce(0);
  }

 private:
  /// Gives the work to the warpgroups, with so many bytes of own tiles to come.
  __device__ __forceinline__ void announce(int bytes) {
    memory_.own_barriers.empty.wait(works_.emptied());
    __syncwarp();
    if (lane_ == 0) memory_.own_barriers.full.arrive_expecting(bytes);
    works_.advance();
  }

  __device__ __forceinline__ void copy_work() {
    const bool is_empty = work_->met.begin == work_->met.end;
    announce(is_empty ? 0 : sizeof memory_.own);
    if (is_empty) return;
    const TileWalk<true>& walk = work_->walks[0];
    if (lane_ == 0) copy_own(walk);
    for (std::int32_t head = 0; head < walk.num_heads; ++head) {
      for (std::int32_t tile = work_->met.begin; tile < work_->met.end; ++tile) {
        copy_other(walk, walk.first_head + head, tile);
      }
    }
  }

  __device__ __forceinline__ void copy_own(const TileWalk<true>& walk) {
    for (int i = 0; i < kBlockTiles; ++i) {
      copy_keys(walk, memory_.own[i], walk.own_tile + i, memory_.own_barriers.full);
    }
  }

  __device__ __forceinline__ void copy_other(const TileWalk<true>& walk, std::int32_t head,
                                             std::int32_t tile) {
    BufferBarriers& barriers = memory_.barriers[ring_.stage()];
    StageInfo& info = memory_.infos[ring_.stage()];
    Pair& pair = memory_.stages[ring_.stage()];
    barriers.empty.wait(ring_.emptied());
    copy_stats(walk, info, head, tile);
    if (lane_ == 0) info.live = live_rows(params_.backward, walk, head, tile);
    __syncwarp();
    if (lane_ == 0) {
      barriers.full.arrive_expecting(sizeof(Pair));
      copy_rows(walk, pair, head, tile, barriers.full);
    }
    ring_.advance();
  }

  /// Rows that do not exist have the statistics of those that see no key.
  __device__ __forceinline__ void copy_stats(const TileWalk<true>& walk, StageInfo& info,
                                             std::int32_t head, std::int32_t tile) {
#pragma unroll
    for (int row = lane_; row < kTile; row += 32) {
      const std::int64_t token = std::int64_t{tile} * kTile + row;
      info.stats[row] =
          token < walk.sequence.query_len
              ? *backward::stats_of<float>(params_.backward, head, walk.row_start + token)
              : RowStats<float>{INFINITY, 0};
    }
  }

  __device__ __forceinline__ void copy_keys(const TileWalk<true>& walk, Pair& to, std::int32_t tile,
                                            const Barrier& barrier) {
    const Sequence& sequence = walk.sequence;
    copy_boxes(to.first, params_.k, sequence.k / call_.k.token_stride, tile, walk.kv_head, barrier);
    copy_boxes(to.second, params_.v, sequence.v / call_.v.token_stride, tile, walk.kv_head,
               barrier);
  }
  __device__ __forceinline__ void copy_rows(const TileWalk<true>& walk, Pair& to, std::int32_t head,
                                            std::int32_t tile, const Barrier& barrier) {
    const Sequence& sequence = walk.sequence;
    copy_boxes(to.first, params_.q, sequence.q / call_.q.token_stride, tile, head, barrier);
    copy_boxes(to.second, params_.dout, sequence.dout / call_.dout.token_stride, tile, head,
               barrier);
  }
  __device__ __forceinline__ void copy_boxes(unsigned char (&to)[Pair::kBoxes][Pair::kBoxBytes],
                                             const CUtensorMap& map, std::int64_t first_row,
                                             std::int32_t tile, std::int32_t head,
                                             const Barrier& barrier) {
    for (int box = 0; box < Pair::kBoxes; ++box) {
      copy_box(shared_address(to[box]), map, box * kBoxColumns,
               static_cast<int>(first_row) + tile * kTile, head, barrier);
    }
  }

  const HopperBackwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  const int lane_;
  BackwardWork* work_ = nullptr;
  WorkPosition works_;
  RingPosition<Memory::kStages> ring_;
};

}  // namespace ladon::cuda::hopper
