// What the warpgroups of Hopper's forward kernel do in either schedule: products, softmax, folds.
#pragma once

#include <cstdint>

#include "cuda/hopper/forward_rows.cuh"
#include "cuda/hopper/forward_tile.cuh"
#include "cuda/hopper/forward_weights.cuh"
#include "cuda/hopper/quad_values.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

/// A warpgroup that computes 64 rows of each tile. What is seldom needed is computed anew each
/// time: registers are few.
template <class Half, int kHead, int kValue, ForwardRules kRules = ForwardRules::kWindow>
class ForwardWarpgroup {
 public:
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  using Shape = typename Memory::Shape;
  using Scores = ForwardScores<Half, kRules, Shape::kKeepsRows>;
  using Sums = ForwardSums<Half, kValue / 8>;
  using BlockScores = float[kKeyGroups][4];
  using Weights = std::uint32_t[kWeightSteps][4];

  __device__ __forceinline__ ForwardWarpgroup(const HopperForwardParams& params, Memory& memory)
      : params_(params), call_(params.forward.call), memory_(memory) {}

 protected:
  /// The warpgroup's number among those that compute.
  __device__ __forceinline__ static int group() {
    return uniform(static_cast<int>(fresh(threadIdx.x) / kGroupThreads) - 1);
  }
  /// Its first row, in a tile.
  __device__ __forceinline__ static int group_row() { return group() * kGroupRows; }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x)) % 32; }
  /// Among those that compute; each has 16 rows.
  __device__ __forceinline__ static int warp() {
    return static_cast<int>((fresh(threadIdx.x) - kGroupThreads) / 32);
  }
  /// The thread's two rows are this one and 8 below.
  __device__ __forceinline__ static int row_of_thread() { return warp() * 16 + lane() / 4; }

  /// One arrival a warp, after all its lanes are done with the buffer.
  __device__ __forceinline__ void release(BufferBarriers& barriers) {
    __syncwarp();
    if (lane() == 0) barriers.empty.arrive();
  }
  __device__ __forceinline__ void release_queries() {
    release(memory_.query_barriers[queries_.stage()]);
  }
  __device__ __forceinline__ void release_keys() {
    release(memory_.key_barriers[keys_.stage()]);
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(memory_.value_barriers[values_.stage()]);
    values_.advance();
  }

  /// Blocks that only another warpgroup's rows see.
  __device__ __forceinline__ void skip(int block, int end) {
    for (; block < end; ++block) {
      memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
      release_keys();
      memory_.value_barriers[values_.stage()].full.wait(values_.filled());
      release_values();
    }
  }

  /// Where the rows are among their blocks.
  struct Steps {
    int first;  // block
    RowState<float> segment[2];
    float offset[2] = {NAN, NAN};  // see offset_of()
    bool starts_segment;           // the last block does
    bool raises;                   // it raises a maximum
    QuadValues rescale;            // where it does
    QuadValues finished;           // the segment before, where it starts one
    QuadValues total;              // of earlier segments
  };

  /// Loads the warp's queries to registers, and releases their buffer.
  __device__ __forceinline__ void hold_queries() {
    const int row = warp() * 16 + lane() % 16;
    const std::uint32_t queries = shared_address(memory_.queries[queries_.stage()]);
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      load_matrices(held_queries_[step], queries +
                                             static_cast<unsigned>(step / 4 * Memory::kQueryBytes) +
                                             swizzled_offset(row, step % 4 * 2 + lane() / 16));
    }
    release_queries();
  }

  /// S = Q K^T of a block.
  __device__ __forceinline__ void start_scores(BlockScores& scores) {
    memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
    const TileOperand keys(shared_address(memory_.keys[keys_.stage()]), Memory::kBlockBytes);
    const TileOperand queries(shared_address(memory_.queries[queries_.stage()]) +
                                  static_cast<unsigned>(group_row() * kBoxRowBytes),
                              Memory::kQueryBytes);
    hold_in_place(scores);
    begin_products();
#pragma unroll
    for (int step = 0; step < kHead / 16; ++step) {
      const int inside = step % 4 * 32;
      const std::uint64_t b = keys.descriptor(step / 4 * Memory::kBlockBytes + inside);
      if constexpr (Shape::kHoldsQueries) {
        step == 0 ? start_product<Half, false, false>(scores, held_queries_[step], b)
                  : start_product<Half, false, true>(scores, held_queries_[step], b);
      } else {
        const std::uint64_t a = queries.descriptor(step / 4 * Memory::kQueryBytes + inside);
        step == 0 ? start_product<Half, false>(scores, a, b)
                  : start_product<Half, true>(scores, a, b);
      }
    }
    commit_products();
  }

  /// O += P V of a block.
  __device__ __forceinline__ void start_sums(Sums& sums, const Weights& weights) {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    const TileOperand values(shared_address(memory_.values[values_.stage()]), Memory::kBlockBytes);
    hold_in_place(sums.accumulators());
    begin_products();
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      start_product<Half, true>(sums.accumulators(), weights[step],
                                values.descriptor(step * 16 * kBoxRowBytes));
    }
    commit_products();
  }

  /// Scores of a block become weights. `whole`: the blocks that need no mask, in shared memory.
  __device__ __forceinline__ void weigh(Scores& rules, BlockScores& scores, int block,
                                        const volatile BlockRange& whole, Steps& steps,
                                        Weights& weights) {
    constexpr bool kAll = kRules == ForwardRules::kAll;
    if (kAll || block < whole.begin || block >= whole.end) {
      rules.apply_rules(scores, block, nullptr);
    }
    steps.starts_segment = block % Shape::kSegmentBlocks == 0;
    if (steps.starts_segment) {
      steps.finished.set(row_sum(steps.segment[0]), row_sum(steps.segment[1]));
      steps.segment[0] = {};
      steps.segment[1] = {};
    }
    const float factor = params_.forward.factor;
    // Weights that dropout changes stay in the place of the scores.
    const bool drops = kAll && call_.rules.dropout;
    unsigned kept = 0;
    if constexpr (kAll) kept = drops ? rules.kept(block) : 0;
    steps.raises = steps.starts_segment || drops ||
                   !weigh_below<Half>(scores, factor, steps.offset, steps.segment, weights);
    if (steps.raises) {
      steps.rescale.set_pair(0, weigh_any<Half>(scores, factor, steps.segment));
#pragma unroll
      for (int i = 0; i < 2; ++i) steps.offset[i] = offset_of<Half>(steps.segment[i], factor);
      if constexpr (kAll) {
        if (drops) rules.drop(scores, kept);
      }
#pragma unroll
      for (int i = 0; i < kWeightSteps; ++i) rounded_weights<Half>(scores, i, weights[i]);
    }
    finish_before_wait(steps.segment[0].sum, steps.segment[1].sum, memory_.tiles);
  }

  /// Prepares the sums, which no products are adding to, for those of `block`, the last one
  /// weighed.
  __device__ __forceinline__ void settle(Sums& sums, Steps& steps, int block) {
    if (steps.starts_segment && block != steps.first) {
      // Rows were put together where sums of segments are kept.
      Memory::kStoresBoxes ? finish_boxes() : __syncwarp();
      RowState<float> total[2];
      fold<false>(sums, steps, steps.finished.state(0), steps.finished.state(1), block - 1, total);
      steps.total.set(total[0], total[1]);
      sums.clear();
    } else if (steps.raises) {
      sums.rescale(steps.rescale.pair(0));
    }
  }

  /// After the last block: the state of all segments, whose sums stay in registers.
  __device__ __forceinline__ void finish(Sums& sums, const Steps& steps, int block,
                                         RowState<float> (&total)[2]) {
    fold<true>(sums, steps, row_sum(steps.segment[0]), row_sum(steps.segment[1]), block, total);
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  RingPosition<Shape::kQueryStages> queries_;
  RingPosition<Memory::kTiles> tiles_;
  RingPosition<Shape::kKeyStages> keys_;
  RingPosition<Shape::kValueStages> values_;
  std::uint32_t held_queries_[Shape::kHoldsQueries ? kHead / 16 : 1][4];

 private:
  /// The thread's sums of earlier segments.
  __device__ __forceinline__ float4* earlier() const {
    constexpr int kGroups = kValue / 8;
    if constexpr (Shape::kSumsInShared) {
      return &memory_.earlier[warp() * kGroups][lane()];
    } else {
      const auto place = static_cast<int>(blockIdx.x) * Shape::kConsumers * 4 + warp();
      return params_.earlier + (static_cast<std::int64_t>(place) * kGroups * 32 + lane());
    }
  }

  /// Folds the segment that ends with `block`, of which the rows have these states, into the
  /// earlier ones.
  template <bool kIsLast>
  __device__ __forceinline__ void fold(Sums& sums, const Steps& steps, const RowState<float>& first,
                                       const RowState<float>& second, int block,
                                       RowState<float> (&total)[2]) {
    const bool has_earlier = block / Shape::kSegmentBlocks != steps.first / Shape::kSegmentBlocks;
    if (has_earlier) {
      total[0] = steps.total.state(0);
      total[1] = steps.total.state(1);
    }
    const Base2Exp exp_of{params_.forward.factor};
    const Fold<float> folds[2] = {{total[0], first, exp_of}, {total[1], second, exp_of}};
    total[0] = folds[0].state;
    total[1] = folds[1].state;
    // Registers hold so many.
    constexpr int kAtOnce = kHead > 128 ? 4 : 8;
    sums.template fold<kAtOnce>(folds, earlier(), 32, has_earlier, kIsLast);
  }
};

}  // namespace ladon::cuda::hopper
