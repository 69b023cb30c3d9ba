// The warp of Hopper's backward kernel that copies tiles to shared memory.
#pragma once

#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

/// All boxes of a tile's rows, by one thread.
template <int kBoxes, int kBoxBytes>
__device__ __forceinline__ void copy_boxes(unsigned char (&to)[kBoxes][kBoxBytes],
                                           const CUtensorMap& map, std::int64_t first_row,
                                           std::int32_t head, const Barrier& barrier) {
  for (int box = 0; box < kBoxes; ++box) {
    copy_box(shared_address(to[box]), map, box * kBoxColumns, static_cast<int>(first_row), head,
             barrier);
  }
}

/// The statistics of a row. One that does not exist has those of a row that sees no key.
template <bool kOwnKeys>
__device__ __forceinline__ RowStats<float> load_stats(const BackwardParams& params,
                                                      const TileWalk<kOwnKeys>& walk,
                                                      std::int32_t head, std::int64_t token) {
  return token < walk.sequence.query_len
             ? *backward::stats_of<float>(params, head, walk.row_start + token)
             : RowStats<float>{INFINITY, 0};
}

template <class Shape>
class BackwardProducer {
 public:
  using Memory = BackwardMemory<Shape>;

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
#pragma unroll 1
        for (int step = 0; step < Shape::kSteps; ++step) {
          copy_other(walk, walk.first_head + head, tile, step);
        }
      }
    }
  }

  __device__ __forceinline__ void copy_own(const TileWalk<true>& walk) {
    for (int i = 0; i < kBlockTiles; ++i) {
      copy_keys(walk, memory_.own[i], (walk.own_tile + i) * kTile, memory_.own_barriers.full);
    }
  }

  /// The rows of a step of a tile.
  __device__ __forceinline__ void copy_other(const TileWalk<true>& walk, std::int32_t head,
                                             std::int32_t tile, int step) {
    BufferBarriers& barriers = memory_.barriers[ring_.stage()];
    auto& info = memory_.infos[ring_.stage()];
    auto& pair = memory_.stages[ring_.stage()];
    const std::int32_t first = tile * kTile + step * Shape::kStepRows;
    // Read while the stage is still in use.
    RowStats<float> stats[Shape::kStepRows / 32];
#pragma unroll
    for (int i = 0; i < Shape::kStepRows / 32; ++i) {
      stats[i] = load_stats(params_.backward, walk, head, std::int64_t{first} + lane_ + i * 32);
    }
    const std::uint64_t live = step_rows(live_rows(params_.backward, walk, head, tile), step);
    barriers.empty.wait(ring_.emptied());
#pragma unroll
    for (int i = 0; i < Shape::kStepRows / 32; ++i) info.stats[lane_ + i * 32] = stats[i];
    if (lane_ == 0) info.live = live;
    __syncwarp();
    if (lane_ == 0) {
      barriers.full.arrive_expecting(sizeof pair);
      copy_rows(walk, pair, head, first, barriers.full);
    }
    ring_.advance();
  }

  /// The bits of a step's rows, of those of a tile.
  __device__ __forceinline__ static std::uint64_t step_rows(std::uint64_t live, int step) {
    if constexpr (Shape::kSteps == 1) return live;
    return live >> (step * Shape::kStepRows) | ~std::uint64_t{0} << Shape::kStepRows % kTile;
  }

  __device__ __forceinline__ void copy_keys(const TileWalk<true>& walk,
                                            typename Memory::OwnPair& to, std::int32_t first,
                                            const Barrier& barrier) {
    const Sequence& sequence = walk.sequence;
    copy_boxes(to.first, params_.k, sequence.k / call_.k.token_stride + first, walk.kv_head,
               barrier);
    copy_boxes(to.second, params_.v, sequence.v / call_.v.token_stride + first, walk.kv_head,
               barrier);
  }
  __device__ __forceinline__ void copy_rows(const TileWalk<true>& walk,
                                            typename Memory::StagePair& to, std::int32_t head,
                                            std::int32_t first, const Barrier& barrier) {
    const Sequence& sequence = walk.sequence;
    copy_boxes(to.first, params_.q, sequence.q / call_.q.token_stride + first, head, barrier);
    copy_boxes(to.second, params_.dout, sequence.dout / call_.dout.token_stride + first, head,
               barrier);
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
