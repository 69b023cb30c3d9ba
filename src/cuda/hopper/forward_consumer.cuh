// A warpgroup of Hopper's forward kernel that computes: scores, softmax, weighted sums.
#pragma once

#include <cstdint>

#include "cuda/hopper/forward_rows.cuh"
#include "cuda/hopper/forward_tile.cuh"
#include "cuda/hopper/forward_weights.cuh"
#include "cuda/hopper/wgmma.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

/// A warpgroup that computes 64 rows of each tile.
template <class Half, int kHead, int kValue>
class ForwardConsumer {
 public:
  using Memory = ForwardMemory<kHead, kValue>;
  using Scores = ForwardScores<Half, ForwardRules::kWindow>;
  using Sums = ForwardSums<Half, kValue / 8>;

  __device__ __forceinline__ ForwardConsumer(const HopperForwardParams& params, Memory& memory)
      : params_(params), call_(params.forward.call), memory_(memory) {}

  __device__ __forceinline__ void run() {
    PairScores scores;
    Row results[2];
    bool has_results = false;
    while (true) {
      memory_.query_barriers.full.wait(queries_.filled());
      const AnnouncedTile& tile = memory_.tiles[tiles_.stage()];
      const Work work = work_of(tile);
      if (work.sequence < 0) break;
      start(work, scores);
      // Meanwhile, the results of the tile before.
      if (has_results) store(tile_before(), results);
      run_tile(tile, work, scores, results);
      has_results = true;
      queries_.advance();
      tiles_.advance();
    }
    if (has_results) store(tile_before(), results);
  }

 private:
  static constexpr int kQuerySteps = kHead / 16;

  // What is seldom needed is computed anew each time: registers are few.

  /// The warpgroup's first row, in a tile.
  __device__ __forceinline__ static int group_row() {
    return uniform(static_cast<int>(fresh(threadIdx.x) / kGroupThreads) - 1) * kGroupRows;
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x)) % 32; }
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
    if (lane() == 0) barriers.empty.arrive();
  }
  __device__ __forceinline__ void release_keys() {
    release(memory_.key_barriers[keys_.stage()]);
    keys_.advance();
  }
  __device__ __forceinline__ void release_values() {
    release(memory_.value_barriers[values_.stage()]);
    values_.advance();
  }

  using PairScores = float[2][kKeyGroups][4];

  using Row = FinishedRow<Half, kValue / 8>;

  __device__ __forceinline__ const AnnouncedTile& tile_before() const {
    return memory_.tiles[(tiles_.stage() + Memory::kTiles - 1) % Memory::kTiles];
  }

  /// What of a tile must be known while its products run, the same for all threads of a warp.
  struct Work {
    int sequence;
    BlockRange copied;
    BlockRange blocks;
  };

  __device__ __forceinline__ Work work_of(const AnnouncedTile& tile) const {
    return {uniform(tile.tile.sequence), uniform(tile.blocks.copied),
            uniform(tile.blocks.seen[group_row() / kGroupRows])};
  }

  /// Starts a tile's first scores.
  __device__ __forceinline__ void start(const Work& work, PairScores& scores) {
    keys_.make_uniform();
    values_.make_uniform();
    skip(first_pair(work.copied), first_pair(work.blocks));
    start_scores<0>(scores);
  }

  __device__ __forceinline__ void run_tile(const AnnouncedTile& announced, const Work& work,
                                           PairScores& scores, Row (&results)[2]) {
    Sums sums(static_cast<int>(call_.value_dim));
    sums.clear();
    RowState<float> total[2];
    const ForwardTile& tile = announced.tile;
    const Sequence& sequence = announced.sequence;
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
    const TokenRange tokens =
        tokens_of_rows(sequence, tile, group_row(), group_row() + kGroupRows - 1);
    const BlockRange whole =
        uniform(whole_blocks(call_.rules, sequence, tokens.first, tokens.last));
    NoStagedScores none;
    Scores rules(params_.forward, sequence, tile.heads, first_row, rows, none);
    run_blocks(rules, scores, sums, work.blocks, whole, total);
    skip((work.blocks.end + 1) / 2 * 2, work.copied.end);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const QueryRow query = query_of(tile.heads, first_row + i * 8);
      results[i].set(params_.forward, query.head, i, total[i], sums.accumulators());
      hold_in_place(results[i].pairs);
    }
  }

  /// Pairs of blocks that only the other warpgroup's rows see.
  __device__ __forceinline__ void skip(int pair, int end) {
    for (; pair < end; pair += 2) {
      for (int block = 0; block < 2; ++block) {
        if (block % Memory::kKeyBlocks == 0) {
          memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
          release_keys();
        }
        skip_values();
      }
    }
  }
  __device__ __forceinline__ void skip_values() {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    release_values();
  }

  /// The states of two rows, which their four lanes share, in one register of each.
  class QuadStates {
   public:
    __device__ __forceinline__ RowState<float> state(int row) const {
      return {__shfl_sync(0xffffffffU, part_, row * 2, 4),
              __shfl_sync(0xffffffffU, part_, row * 2 + 1, 4)};
    }
    __device__ __forceinline__ void set(const RowState<float>& first,
                                        const RowState<float>& second) {
      const bool is_sum = (fresh(threadIdx.x) & 1U) != 0;
      const bool is_second = (fresh(threadIdx.x) & 2U) != 0;
      const float of_first = is_sum ? first.sum : first.maximum;
      const float of_second = is_sum ? second.sum : second.maximum;
      part_ = is_second ? of_second : of_first;
    }

   private:
    float part_;
  };

  using Weights = std::uint32_t[kWeightSteps][4];

  /// Where the rows are among their blocks.
  struct Steps {
    BlockRange whole;  // blocks that need no mask
    QuadStates total;  // of earlier segments
    RowState<float> segment[2];
    float offset[2] = {NAN, NAN};  // see offset_of()
    RowState<float> finished[2];   // the segment before, where the last block starts one
    float2 rescale;                // where it raises a maximum
    bool raises = false;
    bool starts_segment = false;
    bool has_earlier = false;  // sums of earlier segments
    Weights weights[2];  // of a pair's blocks: products may read one while the other is computed
  };

  __device__ __forceinline__ void run_blocks(Scores& rules, PairScores& scores, Sums& sums,
                                             const BlockRange& blocks, const BlockRange& whole,
                                             RowState<float> (&total)[2]) {
    Steps steps;
    steps.whole = whole;
    steps.total.set({}, {});
    const int first = first_pair(blocks);
    int pair = first;
    finish_products<0>();
    hold_in_place(scores[0]);
    if constexpr (Memory::kKeyBlocks == 1) release_keys();
    start_scores<1>(scores);
    weigh<0>(rules, scores, pair, steps);
    finish_products<0>();
    hold_in_place(scores[1]);
    release_keys();
    for (; pair + 2 < blocks.end; pair += 2) {
      settle(sums, steps, pair == first);
      start_scores<0>(scores);
      start_sums(sums, steps.weights[0]);
      weigh<1>(rules, scores, pair, steps);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      hold_in_place(scores[0]);
      release_values();
      if constexpr (Memory::kKeyBlocks == 1) release_keys();
      start_scores<1>(scores);
      settle(sums, steps, false);
      start_sums(sums, steps.weights[1]);
      weigh<0>(rules, scores, pair + 2, steps);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      hold_in_place(scores[1]);
      release_values();
      release_keys();
    }
    release(memory_.query_barriers);
    settle(sums, steps, pair == first);
    start_sums(sums, steps.weights[0]);
    if (pair + 1 < blocks.end) {
      weigh<1>(rules, scores, pair, steps);
      finish_products<0>();
      hold_in_place(sums.accumulators());
      release_values();
      settle(sums, steps, false);
      start_sums(sums, steps.weights[1]);
    }
    finish_products<0>();
    hold_in_place(sums.accumulators());
    release_values();
    if (blocks.end % 2 == 1) skip_values();
    fold<true>(sums, steps.segment, steps);
    total[0] = steps.total.state(0);
    total[1] = steps.total.state(1);
  }

  /// Scores of the first or second block of a pair become weights.
  template <int kBlock>
  __device__ __forceinline__ void weigh(Scores& rules, PairScores& scores, int pair, Steps& steps) {
    const int block = pair + kBlock;
    if (block < steps.whole.begin || block >= steps.whole.end) {
      rules.apply_rules(scores[kBlock], block, nullptr);
    }
    static_assert(kSegmentBlocks % 2 == 0);
    steps.starts_segment = kBlock == 0 && block % kSegmentBlocks == 0;
    steps.raises = false;
    if (steps.starts_segment) {
      steps.finished[0] = steps.segment[0];
      steps.finished[1] = steps.segment[1];
      steps.segment[0] = {};
      steps.segment[1] = {};
    }
    const float factor = params_.forward.factor;
    if (steps.starts_segment || !weigh_below<Half>(scores[kBlock], factor, steps.offset,
                                                   steps.segment, steps.weights[kBlock])) {
      steps.raises = true;
      steps.rescale = weigh_any<Half>(scores[kBlock], factor, steps.segment);
#pragma unroll
      for (int i = 0; i < 2; ++i) steps.offset[i] = offset_of<Half>(steps.segment[i], factor);
#pragma unroll
      for (int i = 0; i < kWeightSteps; ++i) {
        rounded_weights<Half>(scores[kBlock], i, steps.weights[kBlock][i]);
      }
    }
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

  /// Prepares the sums, which no products are adding to, for those of the next block.
  __device__ __forceinline__ void settle(Sums& sums, Steps& steps, bool is_first) {
    if (steps.starts_segment && !is_first) {
      fold<false>(sums, steps.finished, steps);
      sums.clear();
      steps.has_earlier = true;
    } else if (steps.raises) {
      sums.rescale(steps.rescale);
    }
  }

  /// S = Q K^T of the first or second block of a pair.
  template <int kBlock>
  __device__ __forceinline__ void start_scores(PairScores& scores) {
    constexpr int kPlace = kBlock % Memory::kKeyBlocks;  // in the buffer
    if constexpr (kPlace == 0) memory_.key_barriers[keys_.stage()].full.wait(keys_.filled());
    const TileOperand keys(shared_address(memory_.keys[keys_.stage()]), Memory::kKeyBytes);
    const TileOperand queries(
        shared_address(memory_.queries) + static_cast<unsigned>(group_row() * kBoxRowBytes),
        Memory::kQueryBytes);
    auto& sums = scores[kBlock];
    hold_in_place(sums);
    begin_products();
#pragma unroll
    for (int step = 0; step < kQuerySteps; ++step) {
      const int inside = step % 4 * 32;
      const std::uint64_t a = queries.descriptor(step / 4 * Memory::kQueryBytes + inside);
      const std::uint64_t b = keys.descriptor(step / 4 * Memory::kKeyBytes + inside +
                                              kPlace * kBlockKeys * kBoxRowBytes);
      step == 0 ? start_product<Half, false>(sums, a, b) : start_product<Half, true>(sums, a, b);
    }
    commit_products();
  }

  /// O += P V.
  __device__ __forceinline__ void start_sums(Sums& sums, const Weights& weights) {
    memory_.value_barriers[values_.stage()].full.wait(values_.filled());
    const TileOperand values(shared_address(memory_.values[values_.stage()]), Memory::kValueBytes);
    hold_in_place(sums.accumulators());
    begin_products();
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      start_product<Half, true>(sums.accumulators(), weights[step],
                                values.descriptor(step * 16 * kBoxRowBytes));
    }
    commit_products();
  }

  /// Folds the segment into the earlier ones. After the last, sums and states stay in registers.
  template <bool kIsLast>
  __device__ __forceinline__ void fold(Sums& sums, RowState<float> (&segment)[2], Steps& steps) {
    const Base2Exp exp_of{params_.forward.factor};
    const Fold<float> folds[2] = {{steps.total.state(0), row_sum(segment[0]), exp_of},
                                  {steps.total.state(1), row_sum(segment[1]), exp_of}};
    steps.total.set(folds[0].state, folds[1].state);
    sums.fold(folds, &memory_.earlier[warp()][0][lane()], 32, steps.has_earlier, kIsLast);
  }

  __device__ __forceinline__ void store(const AnnouncedTile& announced, Row (&results)[2]) {
    const ForwardTile& tile = announced.tile;
    const Sequence& sequence = announced.sequence;
    const int first_row = tile.first_token * tile.heads.heads + row_of_thread();
    const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = first_row + i * 8;
      const QueryRow query = query_of(tile.heads, row);
      const bool exists = row < rows;
      if (exists && call_.lse.data != nullptr && lane() % 4 == 0) {
        store_lse(call_.lse,
                  sequence.lse + query.token * call_.lse.token_stride +
                      query.head * call_.lse.head_stride,
                  results[i].lse);
      }
      results[i].store(static_cast<Half*>(call_.out.data) + sequence.out +
                           query.token * call_.out.token_stride +
                           query.head * call_.out.head_stride,
                       static_cast<int>(call_.value_dim), exists, params_.forward.aligned_out);
      if (exists && !results[i].is_finite) mark_unfinished(tile, query);
    }
  }

  /// Mostly without a division.
  __device__ __forceinline__ static QueryRow query_of(const RowHeads& heads, int row) {
    if (heads.heads == 1) return {row, heads.first};
    return heads.query_of(row);
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
  RingPosition<1> queries_;
  RingPosition<Memory::kTiles> tiles_;
  RingPosition<Memory::kKeyStages> keys_;
  RingPosition<Memory::kValueStages> values_;
};

}  // namespace ladon::cuda::hopper
