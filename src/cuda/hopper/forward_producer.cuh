// The thread of Hopper's forward kernel that copies queries, keys and values to shared memory.
#pragma once

#include "cuda/hopper/forward_tile.cuh"

namespace ladon::cuda::hopper {

/// The thread that copies what forward_planner.cuh has planned.
template <int kHead, int kValue, ForwardRules kRules>
class ForwardProducer {
 public:
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;

  __device__ __forceinline__ ForwardProducer(const HopperForwardParams& params, Memory& memory)
      : params_(params), memory_(memory) {}

  __device__ __forceinline__ void run() {
    prefetch_map(params_.q);
    prefetch_map(params_.k);
    prefetch_map(params_.v);
    while (true) {
      memory_.plan_barriers.full.wait(plan_.filled());
      plan_.advance();
      if (next_tile().tile.sequence < 0) break;
      start_tile();
      copy_blocks();
    }
    announce(0);
    request_plan();
  }

 private:
  // A tile is planned while so many blocks of the one before are still to be copied: enough to do
  // it meanwhile, and few, so that whoever is free first gets the next tile.
  static constexpr int kBlocksAfterPlan = 8;

  /// Gives the next tile to the warpgroups, with so many bytes of queries to come.
  __device__ __forceinline__ void announce(int bytes) {
    BufferBarriers& barriers = memory_.query_barriers[query_stage()];
    barriers.empty.wait((announced_ / Shape::kQueryStages & 1U) ^ 1U);
    barriers.full.arrive_expecting(bytes);
  }
  __device__ __forceinline__ AnnouncedTile& next_tile() {
    return memory_.tiles[announced_ % Memory::kTiles];
  }
  __device__ __forceinline__ unsigned query_stage() const {
    return announced_ % Shape::kQueryStages;
  }

  /// Copies the queries, and the first keys.
  __device__ __forceinline__ void start_tile() {
    const AnnouncedTile& noted = next_tile();
    // Where queries have one buffer, which is in use until the last tile's last scores, the first
    // keys come before them.
    if constexpr (Shape::kQueryStages == 1) copy_keys(noted, 0);
    announce(sizeof memory_.queries[0]);
#pragma unroll 1
    for (int box = 0; box < Memory::kHeadBoxes; ++box) {
      copy_box(shared_address(memory_.queries[query_stage()][box]), params_.q, box * kBoxColumns,
               noted.tile.heads.first, noted.query_row, memory_.query_barriers[query_stage()].full);
    }
    if constexpr (Shape::kQueryStages > 1) copy_keys(noted, 0);
    ++announced_;
  }
  /// Copies the rest of the keys, and the values.
  __device__ __forceinline__ void copy_blocks() {
    const AnnouncedTile& noted = memory_.tiles[(announced_ - 1) % Memory::kTiles];
    const int blocks = count_blocks(noted);
    const int last_before_plan = max(blocks - kBlocksAfterPlan, 0);
    for (int i = 0; i < blocks; ++i) {
      if (i == last_before_plan) request_plan();
      copy_block(noted, i);
    }
  }
  /// Lets the next tile be planned.
  __device__ __forceinline__ void request_plan() { memory_.plan_barriers.empty.arrive(); }

  __device__ __forceinline__ static int count_blocks(const AnnouncedTile& noted) {
    return noted.blocks.copied.end - noted.blocks.copied.begin;
  }
  /// A block's values, and the keys of the next one, which are needed before them.
  __device__ __forceinline__ void copy_block(const AnnouncedTile& noted, int block) {
    if (block + 1 < count_blocks(noted)) copy_keys(noted, block + 1);
    copy_rows(memory_.values, memory_.value_barriers, values_, params_.v,
              noted.value_row + block * kBlockKeys, noted.kv_head);
    ++values_;
  }
  __device__ __forceinline__ void copy_keys(const AnnouncedTile& noted, int block) {
    copy_rows(memory_.keys, memory_.key_barriers, keys_, params_.k,
              noted.key_row + block * kBlockKeys, noted.kv_head);
    ++keys_;
  }

  /// Fills the ring's buffer number `count`.
  template <int kStages, int kBoxes, int kBytes>
  __device__ __forceinline__ static void copy_rows(
      unsigned char (&buffers)[kStages][kBoxes][kBytes], BufferBarriers (&barriers)[kStages],
      unsigned count, const CUtensorMap& map, int row, int head) {
    const unsigned stage = count % kStages;
    barriers[stage].empty.wait((count / kStages & 1U) ^ 1U);
    barriers[stage].full.arrive_expecting(sizeof buffers[0]);
#pragma unroll 1
    for (int box = 0; box < kBoxes; ++box) {
      copy_box(shared_address(buffers[stage][box]), map, box * kBoxColumns, row, head,
               barriers[stage].full);
    }
  }

  const HopperForwardParams& params_;
  Memory& memory_;
  RingPosition<1> plan_;
  unsigned announced_ = 0;  // tiles
  unsigned keys_ = 0;       // buffers
  unsigned values_ = 0;
};

}  // namespace ladon::cuda::hopper
