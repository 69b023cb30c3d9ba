// The warpgroups of Hopper's forward kernel that compute, tile by tile.
#pragma once

#include <type_traits>

#include "cuda/hopper/forward_blocks.cuh"
#include "cuda/hopper/forward_ruled_blocks.cuh"

namespace ladon::cuda::hopper {

/// A warpgroup in the schedule of its shape and rules.
template <class Half, int kHead, int kValue, ForwardRules kRules>
using ForwardScheduled =
    std::conditional_t<kRules == ForwardRules::kAll, ForwardRuledBlocks<Half, kHead, kValue>,
                       ForwardBlocks<Half, kHead, kValue>>;

template <class Half, int kHead, int kValue, ForwardRules kRules>
class ForwardConsumer : private ForwardScheduled<Half, kHead, kValue, kRules> {
  using Base = ForwardScheduled<Half, kHead, kValue, kRules>;
  using Base::memory_;
  using Base::queries_;
  using Base::tiles_;
  using typename Base::BlockScores;
  using typename Base::Memory;
  using typename Base::Scores;
  using typename Base::Sums;
  using Rows = FinishedRows<Half, kValue / 8>;

 public:
  using Base::Base;

  __device__ __forceinline__ void run() {
    BlockScores scores;
    Rows results;
    bool has_results = false;
    while (true) {
      memory_.query_barriers[queries_.stage()].full.wait(queries_.filled());
      const AnnouncedTile& tile = memory_.tiles[tiles_.stage()];
      const Work work = work_of(tile);
      if (work.sequence < 0) break;
      start(work, scores);
      // Meanwhile, the results of the tile before.
      if (has_results) store_before(results);
      run_tile(tile, work, scores, results);
      has_results = true;
      queries_.advance();
      tiles_.advance();
    }
    if (has_results) store_before(results);
    if constexpr (Memory::kStoresBoxes) finish_boxes();
  }

 private:
  /// What of a tile must be known while its products run, the same for all threads of a warp.
  struct Work {
    int sequence;
    BlockRange copied;
    BlockRange blocks;
  };

  __device__ __forceinline__ Work work_of(const AnnouncedTile& tile) const {
    return {uniform(tile.tile.sequence), uniform(tile.blocks.copied),
            uniform(tile.blocks.seen[Base::group()])};
  }

  /// Starts a tile's first scores.
  __device__ __forceinline__ void start(const Work& work, BlockScores& scores) {
    this->keys_.make_uniform();
    this->values_.make_uniform();
    queries_.make_uniform();
    if constexpr (Base::Shape::kHoldsQueries) this->hold_queries();
    this->skip(work.copied.begin, work.blocks.begin);
    this->start_scores(scores);
  }

  __device__ __forceinline__ void run_tile(const AnnouncedTile& announced, const Work& work,
                                           BlockScores& scores, Rows& results) {
    Sums sums(static_cast<int>(this->call_.value_dim));
    sums.clear();
    RowState<float> total[2];
    const ForwardTile& tile = announced.tile;
    const Sequence& sequence = announced.sequence;
    const int first_row = tile.first_token * tile.heads.heads + Base::row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
    Scores rules(this->params_.forward, sequence, tile.heads, first_row, rows);
    this->run_blocks(rules, scores, sums, work.blocks, announced.blocks.whole[Base::group()],
                     total);
    this->skip(work.blocks.end, work.copied.end);
    results.set(this->params_.forward, tile.heads, Base::row_of_thread(), total,
                sums.accumulators());
    hold_in_place(results.pairs);
  }

  /// Stores the tile before.
  __device__ __forceinline__ void store_before(Rows& results) {
    const int place = (tiles_.stage() + Memory::kTiles - 1) % Memory::kTiles;
    store_rows<Memory>(this->params_, memory_.tiles[place], Base::warp() * kStoredRows, results,
                       memory_.staging(Base::warp()));
  }
};

}  // namespace ladon::cuda::hopper
