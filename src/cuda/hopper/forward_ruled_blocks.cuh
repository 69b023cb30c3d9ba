// The schedule of Hopper's forward kernel for calls with rules beyond a scale and a window,
// whatever their heads: blocks of keys one by one, as in forward_blocks.cuh. All rules are much
// code, which is why it is in one place here, also for a tile's first block.
//
// Where registers suffice, the weighted sums of a block are under way while the rules and the
// softmax of the next one run; else the products of other warpgroups are.
#pragma once

#include "cuda/hopper/forward_warpgroup.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue>
class ForwardRuledBlocks : public ForwardWarpgroup<Half, kHead, kValue, ForwardRules::kAll> {
 public:
  using Base = ForwardWarpgroup<Half, kHead, kValue, ForwardRules::kAll>;
  using Base::Base;
  using typename Base::BlockScores;
  using typename Base::Scores;
  using typename Base::Steps;
  using typename Base::Sums;
  using typename Base::Weights;

 protected:
  __device__ __forceinline__ void run_blocks(Scores& rules, BlockScores& scores, Sums& sums,
                                             const BlockRange& blocks,
                                             const volatile BlockRange& whole,
                                             RowState<float> (&total)[2]) {
    Weights weights = {};
    Steps steps;
    steps.first = blocks.begin;
    int block = blocks.begin;
    finish_products<0>();
    hold_in_place(scores);
    while (true) {
      this->release_keys();
      if (block + 1 >= blocks.end) this->release_queries();
      if constexpr (kOverlaps) {
        Weights next;  // products may still read the others
        this->weigh(rules, scores, block, whole, steps, next);
        finish_sums(sums, weights, steps, block != blocks.begin);
        hold_in_place(next);  // or they would be copied before
#pragma unroll
        for (int i = 0; i < kWeightSteps * 4; ++i) weights[i / 4][i % 4] = next[i / 4][i % 4];
      } else {
        Scores anew = rules_of(this->memory_.tiles[this->tiles_.stage()]);
        this->weigh(anew, scores, block, whole, steps, weights);
      }
      this->settle(sums, steps, block);
      if (block + 1 >= blocks.end) break;
      this->start_scores(scores);
      this->start_sums(sums, weights);
      finish_products<kOverlaps ? 1 : 0>();
      hold_in_place(scores);
      if (!kOverlaps) finish_sums(sums, weights, steps, true);
      ++block;
    }
    this->start_sums(sums, weights);
    finish_sums(sums, weights, steps, true);
    this->finish(sums, steps, block, total);
  }

 private:
  static constexpr bool kOverlaps = kHead > 64 && kValue <= 128;

  /// Made anew for each block, so that no registers hold them in between.
  __device__ __forceinline__ Scores rules_of(const AnnouncedTile& announced) const {
    const ForwardTile& tile = announced.tile;
    return {this->params_.forward, announced.sequence, tile.heads,
            tile.first_token * tile.heads.heads + Base::row_of_thread(),
            static_cast<int>(announced.sequence.query_len) * tile.heads.heads};
  }

  /// Waits for the weighted sums of the block before, if they were started.
  __device__ __forceinline__ void finish_sums(Sums& sums, const Weights& weights,
                                              const Steps& steps, bool were_started) {
    finish_products<0>();
    hold_in_place(sums.accumulators());
    if (were_started) this->release_values();
    keep_operands(weights, steps.segment[0].sum, this->memory_.tiles);
  }
};

}  // namespace ladon::cuda::hopper
