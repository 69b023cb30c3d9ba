// A warpgroup of Hopper's forward kernel that computes: scores, softmax, weighted sums.
#pragma once

#include <cstdint>

#include "cuda/hopper/forward_tile.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

/// A warpgroup that computes 64 rows of each tile.
template <class Half, int kColumns>
class ForwardConsumer {
 public:
  using Memory = ForwardMemory<kColumns>;
  using Scores = ForwardScores<Half, ForwardRules::kWindow>;
  using Sums = ForwardSums<Half, kColumns / 8>;

  __device__ __forceinline__ ForwardConsumer(const HopperForwardParams& params, Memory& memory)
      : params_(params),
        call_(params.forward.call),
        memory_(memory),
        lane_(static_cast<int>(threadIdx.x) % 32),
        first_row_((static_cast<int>(threadIdx.x) / kGroupThreads - 1) * kGroupRows) {}

  __device__ __forceinline__ void run() {
    while (true) {
      memory_.query_barriers.full.wait(queries_.filled());
      const ForwardTile tile = uniform(memory_.tiles[queries_.filled()]);
      begin_products();
      if (tile.sequence < 0) return;
      run_tile(tile, call_.sequences[tile.sequence]);
    }
  }

 private:
  static constexpr int kQuerySteps = kColumns / 16;
  static constexpr int kWeightSteps = kBlockKeys / 16;

  /// Among those that compute; each has 16 rows.
  __device__ __forceinline__ int warp() const {
    return static_cast<int>((fresh(threadIdx.x) - kGroupThreads) / 32);
  }

  /// The thread's two rows are this one and 8 below.
  __device__ __forceinline__ int row_of_thread() const {
    return warp() * 16 + static_cast<int>(fresh(threadIdx.x)) % 32 / 4;
  }

  /// One arrival a warp, after all its lanes are done with the buffer.
  __device__ __forceinline__ void release(BufferBarriers& barriers) {
    __syncwarp();
    if (lane_ == 0) barriers.empty.arrive();
  }
  __device__ __forceinline__ void release_keys() {
    release(memory_.key_barriers[keys_.stage()]);
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(memory_.value_barriers[values_.stage()]);
    values_.advance();
  }

  __device__ __forceinline__ void run_tile(const ForwardTile& tile, const Sequence& sequence) {
    const BlockRange copied =
        uniform(blocks_of(call_, sequence, tokens_of_rows(sequence, tile, 0, kTileRows - 1)));
    const TokenRange tokens =
        tokens_of_rows(sequence, tile, first_row_, first_row_ + kGroupRows - 1);
    const BlockRange blocks = uniform(blocks_of(call_, sequence, tokens));
    const BlockRange whole =
        uniform(whole_blocks(call_.rules, sequence, tokens.first, tokens.last));
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
    NoStagedScores none;
    Scores scores(params_.forward, sequence, tile.heads, first_row, rows, none);
    Sums sums(static_cast<int>(call_.value_dim));
    RowState<float> total[2];

    keys_.make_uniform();
    values_.make_uniform();
    sums.clear();
    if (blocks.begin == blocks.end) {
      skip(first_pair(copied), copied.end);
      release(memory_.query_barriers);
    } else {
      skip(first_pair(copied), first_pair(blocks));
      run_blocks(scores, sums, blocks, whole, total);
      skip((blocks.end + 1) / 2 * 2, copied.end);
    }
    store(sums, total);
    queries_.advance();
  }

  /// Pairs of blocks that only the other warpgroup's rows see.
  __device__ __forceinline__ void skip(int pair, int end) {
    for (; pair < end; pair += 2) {
      memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
      release_keys();
      skip_values();
      skip_values();
    }
  }
  __device__ __forceinline__ void skip_values() {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    release_values();
  }

  /// Where the rows are among their blocks.
  struct Steps {
    BlockRange whole;  // blocks that need no mask
    RowState<float> segment[2];
    RowState<float> finished[2];  // the segment before, where the last block starts one
    float2 rescale = make_float2(1, 1);
    bool starts_segment = false;
    bool has_earlier = false;  // sums of earlier segments
  };

  __device__ __forceinline__ void run_blocks(Scores& rules, Sums& sums, const BlockRange& blocks,
                                             const BlockRange& whole, RowState<float> (&total)[2]) {
    Steps steps;
    steps.whole = whole;
    float scores[2][kKeyGroups][4];
    const int first = first_pair(blocks);
    int pair = first;
    start_scores(scores);
    finish_products<0>();
    hold_in_place(scores);
    release_keys();
    for (; pair + 2 < blocks.end; pair += 2) {
      add_block(rules, scores[0], pair, pair == first, sums, steps, total);
      weigh(rules, scores[1], pair + 1, steps);
      settle(sums, steps, false, total);
      round_weights(scores[1]);
      start_scores(scores);
      start_sums(sums);
      finish_products<1>();
      hold_in_place(scores);
      release_keys();
    }
    release(memory_.query_barriers);
    add_block(rules, scores[0], pair, pair == first, sums, steps, total);
    if (pair + 1 < blocks.end) {
      add_block(rules, scores[1], pair + 1, false, sums, steps, total);
    }
    finish_products<0>();
    hold_in_place(sums.accumulators());
    release_values();
    if (blocks.end % 2 == 1) skip_values();
    fold(sums, steps.segment, total, steps.has_earlier, true);
  }

  __device__ __forceinline__ void add_block(Scores& rules, float (&scores)[kKeyGroups][4],
                                            int block, bool is_first, Sums& sums, Steps& steps,
                                            RowState<float> (&total)[2]) {
    weigh(rules, scores, block, steps);
    settle(sums, steps, is_first, total);
    round_weights(scores);
    start_sums(sums);
  }

  /// Scores of a block become weights.
  __device__ __forceinline__ void weigh(Scores& rules, float (&scores)[kKeyGroups][4], int block,
                                        Steps& steps) {
    if (block < steps.whole.begin || block >= steps.whole.end) {
      rules.apply_rules(scores, block, nullptr);
    }
    steps.starts_segment = block % kSegmentBlocks == 0;
    if (steps.starts_segment) {
      steps.finished[0] = steps.segment[0];
      steps.finished[1] = steps.segment[1];
      steps.segment[0] = {};
      steps.segment[1] = {};
    }
    steps.rescale = rules.template weigh<false>(scores, steps.segment);
    keep_before_wait(steps.segment[0].sum, steps.segment[1].sum);
  }

  /// The assembler would move the wait for products up to before the softmax that is to run beside
  /// them. It does not move it past a store, and this one, which never happens, needs the sums.
  __device__ __forceinline__ void keep_before_wait(float first, float second) {
    asm volatile(
        "{\n"
        ".reg .pred never;\n"
        "setp.lt.f32 never, %0, 0f00000000;\n"
        "@never st.shared.f32 [%2], %0;\n"
        "setp.lt.f32 never, %1, 0f00000000;\n"
        "@never st.shared.f32 [%2], %1;\n"
        "}" ::"f"(first),
        "f"(second), "r"(shared_address(memory_.tiles))
        : "memory");
  }

  /// Waits for the products of the block before, and prepares the sums for those of the next.
  __device__ __forceinline__ void settle(Sums& sums, Steps& steps, bool is_first,
                                         RowState<float> (&total)[2]) {
    finish_products<0>();
    hold_in_place(sums.accumulators());
    if (!is_first) release_values();
    if (steps.starts_segment && !is_first) {
      fold(sums, steps.finished, total, steps.has_earlier, false);
      sums.clear();
      steps.has_earlier = true;
    } else {
      sums.rescale(steps.rescale);
    }
  }

  /// S = Q K^T of two blocks.
  __device__ __forceinline__ void start_scores(float (&scores)[2][kKeyGroups][4]) {
    memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
    const TileOperand keys(shared_address(memory_.keys[keys_.stage()]), Memory::kKeyBytes);
    const TileOperand queries(
        shared_address(memory_.queries) + static_cast<unsigned>(first_row_ * kBoxRowBytes),
        Memory::kQueryBytes);
    auto& sums = reinterpret_cast<float(&)[2 * kKeyGroups][4]>(scores);
    hold_in_place(sums);
    begin_products();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const int inside = step % 4 * 32;
      const std::uint64_t a = queries.descriptor(step / 4 * Memory::kQueryBytes + inside);
      const std::uint64_t b = keys.descriptor(step / 4 * Memory::kKeyBytes + inside);
      step == 0 ? start_product<Half, false>(sums, a, b) : start_product<Half, true>(sums, a, b);
    }
    commit_products();
  }

  /// O += P V.
  __device__ __forceinline__ void start_sums(Sums& sums) {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    const TileOperand values(shared_address(memory_.values[values_.stage()]), Memory::kValueBytes);
    hold_in_place(sums.accumulators());
    begin_products();
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      start_product<Half, true>(sums.accumulators(), weights_[step],
                                values.descriptor(step * 16 * kBoxRowBytes));
    }
    commit_products();
  }

  __device__ __forceinline__ void round_weights(const float (&weights)[kKeyGroups][4]) {
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      rounded_weights<Half>(weights, step, weights_[step]);
    }
  }

  __device__ __forceinline__ void fold(Sums& sums, const RowState<float> (&finished)[2],
                                       RowState<float> (&total)[2], bool has_earlier,
                                       bool is_last) {
    const Base2Exp exp_of{params_.forward.factor};
    const Fold<float> folds[2] = {{total[0], row_sum(finished[0]), exp_of},
                                  {total[1], row_sum(finished[1]), exp_of}};
    total[0] = folds[0].state;
    total[1] = folds[1].state;
    sums.fold(folds, &memory_.earlier[warp()][0][lane_], 32, has_earlier, is_last);
  }

  /// What it needs of the rows is computed anew: registers are full while the products run.
  __device__ __forceinline__ void store(const Sums& sums, const RowState<float> (&total)[2]) {
    const ForwardTile tile = memory_.tiles[queries_.filled()];
    const Sequence& sequence = call_.sequences[tile.sequence];
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + i * 8;
      const QueryRow query = tile.heads.query_of(row);
      const bool exists = row < rows;
      store_row(params_.forward, sequence, query, i, exists, total[i], sums, 0);
      if (exists && total[i].sum != 0 && !sums.is_finite(i)) mark_unfinished(tile, query);
    }
  }

  /// Marks the tile of the careful kernel that holds the row: 64 rows of a KV head.
  __device__ __forceinline__ void mark_unfinished(const ForwardTile& tile, const QueryRow& row) {
    const std::int64_t kv_head = row.head / call_.group;
    const std::int64_t careful_row = row.token * call_.group + row.head % call_.group;
    const std::int64_t careful_tile =
        (tile.sequence * call_.num_kv_heads + kv_head) * params_.forward.row_tiles +
        careful_row / kMmaRows;
    params_.forward.unfinished[0] = 1;
    params_.forward.unfinished[1 + careful_tile] = 1;
  }

  const HopperForwardParams& params_;
  const AttentionParams& call_;
  Memory& memory_;
  const int lane_;
  const int first_row_;  // of the warpgroup, in a tile
  std::uint32_t weights_[kWeightSteps][4];
  RingPosition<1> queries_;
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

}  // namespace ladon::cuda::hopper
