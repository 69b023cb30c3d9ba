// The schedule of Hopper's forward kernel for keys of 129 to 192 columns with values up to 128:
// pairs of blocks of keys, with two blocks' scores and weights in registers.
//
// While the softmax of a block runs, the scores of the next one and the weighted sums of the one
// before are under way: a warpgroup keeps the tensor cores busy by itself.
#pragma once

#include "cuda/hopper/forward_warpgroup.cuh"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue>
class ForwardPairs : public ForwardWarpgroup<Half, kHead, kValue> {
 public:
  using Base = ForwardWarpgroup<Half, kHead, kValue>;
  using Base::Base;
  using typename Base::BlockScores;
  using typename Base::Scores;
  using typename Base::Steps;
  using typename Base::Sums;
  using typename Base::Weights;
  using TileScores = BlockScores[2];

 protected:
  __device__ __forceinline__ static BlockScores& first_scores(TileScores& scores) {
    return scores[0];
  }

  __device__ __forceinline__ void run_blocks(Scores& rules, TileScores& scores, Sums& sums,
                                             const BlockRange& blocks,
                                             const BlockRange& noted_whole,
                                             RowState<float> (&total)[2]) {
    const BlockRange whole = uniform(noted_whole);  // read in each block: in registers
    Weights weights[2];  // products may read one while the other is computed
    Steps steps;
    steps.first = first_round<2>(blocks);
    int pair = steps.first;
    finish_products<0>();
    hold_in_place(scores[0]);
    this->release_keys();
    this->start_scores(scores[1]);
    this->template weigh<true>(rules, scores[0], pair, whole, steps, weights[0]);
    finish_products<0>();
    hold_in_place(scores[1]);
    this->release_keys();
    for (; pair + 2 < blocks.end; pair += 2) {
      this->start_scores(scores[0]);
      this->settle(sums, steps, pair);
      this->start_sums(sums, weights[0]);
      this->template weigh<false>(rules, scores[1], pair + 1, whole, steps, weights[1]);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      hold_in_place(scores[0]);
      this->release_values();
      this->release_keys();
      this->start_scores(scores[1]);
      this->settle(sums, steps, pair + 1);
      this->start_sums(sums, weights[1]);
      this->template weigh<true>(rules, scores[0], pair + 2, whole, steps, weights[0]);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      hold_in_place(scores[1]);
      this->release_values();
      this->release_keys();
    }
    this->release_queries();
    this->settle(sums, steps, pair);
    this->start_sums(sums, weights[0]);
    if (pair + 1 < blocks.end) {
      this->template weigh<false>(rules, scores[1], pair + 1, whole, steps, weights[1]);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      this->release_values();
      this->settle(sums, steps, pair + 1);
      this->start_sums(sums, weights[1]);
    }
    finish_products<0>();
    hold_in_place(sums.accumulators());
    this->release_values();
    if (blocks.end % 2 == 1) this->skip_values();
    this->finish(sums, steps, pair, total);
  }
};

}  // namespace ladon::cuda::hopper
