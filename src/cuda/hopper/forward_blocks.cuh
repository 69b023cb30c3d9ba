// The schedule of Hopper's forward kernel without rules beyond a window: blocks of keys one by one,
// with the scores of one and the weights of two in registers.
//
// While the softmax of a block runs, the weighted sums of the one before are under way, and the
// products of the other warpgroups.
#pragma once

#include "cuda/hopper/forward_warpgroup.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue>
class ForwardBlocks : public ForwardWarpgroup<Half, kHead, kValue> {
 public:
  using Base = ForwardWarpgroup<Half, kHead, kValue>;
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
    constexpr bool kHolds = Base::Shape::kHoldsQueries;  // they are released already
    Weights weights;
    Steps steps;
    steps.first = blocks.begin;
    int block = blocks.begin;
    finish_products<0>();
    hold_in_place(scores);
    this->release_keys();
    if (!kHolds && block + 1 >= blocks.end) this->release_queries();
    this->weigh(rules, scores, block, whole, steps, weights);
    for (; block + 1 < blocks.end; ++block) {
      this->settle(sums, steps, block);
      this->start_scores(scores);
      this->start_sums(sums, weights);
      finish_products<1>();
      hold_in_place(scores);
      this->release_keys();
      if (!kHolds && block + 2 >= blocks.end) this->release_queries();
      Weights next;  // products still read the others
      this->weigh(rules, scores, block + 1, whole, steps, next);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      this->release_values();
      keep_operands(weights, steps.segment[0].sum, this->memory_.tiles);
      hold_in_place(next);  // or they would be copied before
#pragma unroll
      for (int i = 0; i < kWeightSteps * 4; ++i) weights[i / 4][i % 4] = next[i / 4][i % 4];
    }
    this->settle(sums, steps, block);
    this->start_sums(sums, weights);
    finish_products<0>();
    keep_operands(weights, steps.segment[0].sum, this->memory_.tiles);
    hold_in_place(sums.accumulators());
    this->release_values();
    this->finish(sums, steps, block, total);
  }
};

}  // namespace ladon::cuda::hopper
