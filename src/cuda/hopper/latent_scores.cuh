// The warpgroup of Hopper's latent kernel that computes scores and weights.
#pragma once

#include <cstdint>

#include "cuda/hopper/latent_tile.cuh"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tile_elements.cuh"

namespace ladon::cuda::hopper {

/// kTiles share copies.
template <class Half, int kTiles>
class LatentScores {
 public:
  using Scores = ForwardScores<Half, ForwardRules::kWindow>;

  __device__ __forceinline__ LatentScores(const LatentParams& params, LatentMemory& memory)
      : params_(params), call_(params.forward.call), memory_(memory), work_(memory.work) {}

  __device__ __forceinline__ void run() {
    if (!params_.has_rope) clear_rope();
    for (int number = static_cast<int>(blockIdx.x); number < params_.schedule.tasks;
         number = uniform(work_.index) + static_cast<int>(gridDim.x)) {
      take_work<kTiles>(params_, memory_, number, thread() == 0);
      if (uniform(work_.blocks.begin) == uniform(work_.blocks.end)) {
        if (thread() < kLatentRows && params_.schedule.parts == 1) finish_row_of(thread(), {});
        continue;
      }
      scored_ = static_cast<unsigned>(uniform(static_cast<int>(scored_)));
      stored_ = scored_;
      load_queries();
      run_blocks();
    }
  }

 private:
  static constexpr int kWeightSteps = kBlockKeys / 16;
  static constexpr int kBoxSteps = kBoxColumns / 16;
  static constexpr int kRegisterSteps = kRegisterBoxes * kBoxSteps;
  static constexpr int kNamedBarrier = 1;

  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x) % kGroupThreads);
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x) % 32); }
  __device__ __forceinline__ static int warp() {
    return static_cast<int>(fresh(threadIdx.x) % kGroupThreads / 32);
  }
  __device__ __forceinline__ static void sync() { sync_threads(kNamedBarrier, kGroupThreads); }

  /// The first boxes stay in registers, the others in shared memory. All are read at once, and
  /// reach their threads by way of the memory of weights.
  __device__ __forceinline__ void load_queries() {
    constexpr int kChunks = kBoxRowBytes / 16;
    constexpr int kRowsAtOnce = kGroupThreads / kChunks;
    const int chunk = thread() % kChunks;
    const int first = thread() / kChunks;
    uint4 read[kValueBoxes + 1][kLatentRows / kRowsAtOnce];
#pragma unroll
    for (int i = 0; i < kLatentRows / kRowsAtOnce; ++i) {
      const int row = work_.first_row + first + i * kRowsAtOnce;
      const Half* const query = query_row(row) + chunk * kChunkElements;
#pragma unroll
      for (int box = 0; box <= kValueBoxes; ++box) {
        const int column = box * kBoxColumns + chunk * kChunkElements;
        const bool is_present = box < kValueBoxes || column < call_.head_dim;
        read[box][i] = row < work_.rows && is_present
                           ? *reinterpret_cast<const uint4*>(query + box * kBoxColumns)
                           : make_uint4(0, 0, 0, 0);
      }
    }
    const auto store = [&](const unsigned char* tile, int box) {
#pragma unroll
      for (int i = 0; i < kLatentRows / kRowsAtOnce; ++i) {
        const uint4& eight = read[box][i];
        store_16(shared_address(tile) + swizzled_offset(first + i * kRowsAtOnce, chunk), eight.x,
                 eight.y, eight.z, eight.w);
      }
    };
    const unsigned from =
        shared_address(memory_.weights) + swizzled_offset(warp() * 16 + lane() % 16, lane() / 16);
#pragma unroll
    for (int box = 0; box < kRegisterBoxes; ++box) {
      store(memory_.weights, box);
      sync();
#pragma unroll
      for (int step = 0; step < kBoxSteps; ++step) {
        load_matrices(queries_[box * kBoxSteps + step], from ^ static_cast<unsigned>(step << 5));
      }
      sync();
    }
#pragma unroll
    for (int box = kRegisterBoxes; box <= kValueBoxes; ++box) {
      store(memory_.queries[box - kRegisterBoxes], box);
    }
    publish_writes();
    sync();
  }
  __device__ __forceinline__ const Half* query_row(int row) const {
    const QueryRow query = work_.heads(static_cast<int>(call_.group)).query_of(row);
    return static_cast<const Half*>(call_.q.data) + call_.sequences[work_.sequence].q +
           query.token * call_.q.token_stride + query.head * call_.q.head_stride;
  }

  __device__ __forceinline__ void run_blocks() {
    RowState<float> segment[2];
    float scores[kKeyGroups][4];
    std::uint32_t weights[kWeightSteps][4];
    int block = uniform(work_.blocks.begin);
    const int end = uniform(work_.blocks.end);
    start_scores(scores, block);
    finish_scores(scores);
    for (; block + 1 < end; ++block) {
      weigh(scores, block, segment, weights);
      // The next scores are multiplied while the block before is summed, whose end the weights must
      // wait for. After a fold the next latents come later than that.
      const bool are_latents_late = are_weights_free_first();
      if (are_latents_late) {
        store_weights(weights, segment, block);
        let_sum();
      }
      start_scores(scores, block + 1);
      if (!are_latents_late) store_weights(weights, segment, block);
      finish_scores(scores);
      if (!are_latents_late) let_sum();
    }
    weigh(scores, block, segment, weights);
    wait_for_free_weights();
    store_weights(weights);
    finish_segment(segment, block, true);
    publish_weights();
    let_sum();
  }

  /// Waits for the latents of the next block, or until the memory of weights is free. The warps may
  /// go on by different ways: what they wait for afterwards does not depend on each other.
  __device__ __forceinline__ bool are_weights_free_first() {
    Barrier& full = memory_.latents_full[stage_of(scored_)];
    while (!full.has_ended(filled_parity(scored_))) {
      if (memory_.weights_barriers.empty.has_ended((stored_ & 1U) ^ 1U)) return true;
    }
    return false;
  }

  /// Scores of a block become weights, rounded. By what the sums must be multiplied before they are
  /// added is left in memory.
  __device__ __forceinline__ void weigh(float (&scores)[kKeyGroups][4], int block,
                                        RowState<float> (&segment)[2],
                                        std::uint32_t (&weights)[kWeightSteps][4]) {
    // What rows see is found anew where it matters, which is in few blocks: registers are short.
    if (block < work_.whole.begin || block >= work_.whole.end) {
      rules_of(work_.rows).apply_rules(scores, block, nullptr);
    }
    if (block % kSegmentBlocks == 0) {
      segment[0] = {};
      segment[1] = {};
    }
    const float2 rescale = rules_of(0).template weigh<false>(scores, segment);
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      rounded_weights<Half>(scores, step, weights[step]);
    }
    if (lane() % 4 != 0) return;
    float* const factors = memory_.rescale[(scored_ - 1) & 1U] + warp() * 16 + lane() / 4;
    factors[0] = rescale.x;
    factors[8] = rescale.y;
  }

  /// For the thread's rows, of `rows` that exist.
  __device__ __forceinline__ Scores rules_of(int rows) {
    return Scores(params_.forward, call_.sequences[work_.sequence],
                  work_.heads(static_cast<int>(call_.group)),
                  work_.first_row + warp() * 16 + lane() / 4, rows);
  }

  /// S = Q K^T.
  __device__ __forceinline__ void start_scores(float (&scores)[kKeyGroups][4], int block) {
    Barrier& rope_full = memory_.rope_barriers.full;
    const int stage = stage_of(scored_);
    const unsigned rope_parity = scored_ & 1U;
    memory_.latents_full[stage].wait(filled_parity(scored_));
    const int first = block * kBlockKeys - uniform(work_.origin);
    const int kv_len = uniform(work_.kv_len);
    if (first < 0 || first + kBlockKeys > kv_len) {
      if (params_.has_rope) rope_full.wait(rope_parity);
      clear_missing(stage, first, kv_len);
    }
    const TileOperand keys(shared_address(memory_.latents[stage]), kBoxBytes);
    const TileOperand rope(shared_address(memory_.rope), kBoxBytes);
    const TileOperand queries(shared_address(memory_.queries), kBoxBytes);
    hold_in_place(scores);
    begin_products();
#pragma unroll
    for (int step = 0; step < kRegisterSteps; ++step) {
      const std::uint64_t b = keys.descriptor(step / kBoxSteps * kBoxBytes + step % kBoxSteps * 32);
      step == 0 ? start_product<Half, false, false>(scores, queries_[step], b)
                : start_product<Half, false, true>(scores, queries_[step], b);
    }
#pragma unroll
    for (int step = 0; step < kBoxSteps; ++step) {
      start_product<Half, true>(scores, queries.descriptor(step * 32),
                                keys.descriptor(kRegisterBoxes * kBoxBytes + step * 32));
    }
    if (params_.has_rope) rope_full.wait(rope_parity);
    begin_products();
#pragma unroll
    for (int step = 0; step < kBoxSteps; ++step) {
      start_product<Half, true>(scores, queries.descriptor(kBoxBytes + step * 32),
                                rope.descriptor(step * 32));
    }
    commit_products();
    ++scored_;
  }
  __device__ __forceinline__ void finish_scores(float (&scores)[kKeyGroups][4]) {
    finish_products<0>();
    hold_in_place(scores);
    __syncwarp();
    // Without such columns nobody would wait for the arrivals.
    if (params_.has_rope && lane() == 0) memory_.rope_barriers.empty.arrive();
  }

  /// Where there are no such columns: they are multiplied, but never copied.
  __device__ __forceinline__ void clear_rope() {
    for (int byte = thread() * 16; byte < kBoxBytes; byte += kGroupThreads * 16) {
      store_16(shared_address(memory_.rope) + byte, 0, 0, 0, 0);
    }
    publish_writes();
    sync();
  }

  /// Latents that are not the sequence's become 0: their weights are, and 0 * NaN is not.
  __device__ __forceinline__ void clear_missing(int stage, int first, int kv_len) {
    constexpr int kChunks = kBoxBytes / 16;
    const unsigned latents = shared_address(memory_.latents[stage]);
    const unsigned rope = shared_address(memory_.rope);
#pragma unroll 1
    for (int chunk = thread(); chunk < (kValueBoxes + 1) * kChunks; chunk += kGroupThreads) {
      const int key = first + chunk % kChunks / (kBoxRowBytes / 16);
      if (key >= 0 && key < kv_len) continue;
      const int box = chunk / kChunks;
      store_16((box == kValueBoxes ? rope : latents + box * kBoxBytes) + chunk % kChunks * 16, 0, 0,
               0, 0);
    }
    publish_writes();
    sync();
  }

  /// Of a block that is not the last.
  __device__ __forceinline__ void store_weights(const std::uint32_t (&weights)[kWeightSteps][4],
                                                const RowState<float> (&segment)[2], int block) {
    wait_for_free_weights();
    store_weights(weights);
    if ((block + 1) % kSegmentBlocks == 0) finish_segment(segment, block, false);
    publish_weights();
  }
  /// Until the sums are done with those of the block before.
  __device__ __forceinline__ void wait_for_free_weights() {
    memory_.weights_barriers.empty.wait((stored_ & 1U) ^ 1U);
  }
  __device__ __forceinline__ void store_weights(const std::uint32_t (&weights)[kWeightSteps][4]) {
    const unsigned to =
        shared_address(memory_.weights) + swizzled_offset(warp() * 16 + lane() % 16, lane() / 16);
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      store_matrices(to ^ static_cast<unsigned>(step << 5), weights[step]);
    }
  }

  /// Folds the rows' states, and leaves to the other warpgroups how they fold the sums; or keeps
  /// them apart.
  __device__ __forceinline__ void finish_segment(const RowState<float> (&segment)[2], int block,
                                                 bool is_last) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const RowState<float> added = row_sum(segment[i]);
      if (lane() % 4 != 0) continue;
      const int place = warp() * 16 + lane() / 4 + i * 8;
      if (work_.is_apart()) {
        memory_.folds[place] = {0, added.sum == 0 ? 0.0F : 1.0F};
        store_state(place, block / kSegmentBlocks - work_.first_segment, added);
        continue;
      }
      RowState<float>& total = memory_.totals[place];
      if (block / kSegmentBlocks == work_.blocks.begin / kSegmentBlocks) total = {};
      const Fold<float> fold(total, added, Base2Exp{params_.forward.factor});
      total = fold.state;
      memory_.folds[place] = {fold.takes_earlier ? fold.earlier : 0.0F, fold.segment};
      if (is_last) finish_row_of(place, total);
    }
  }
  __device__ __forceinline__ void finish_row_of(int place, const RowState<float>& total) {
    memory_.factors[place] = total.sum == 0 ? -1.0F : 1.0F;
    if (params_.schedule.parts > 1) {
      return store_state(place, params_.schedule.part_segments - 1, total);
    }
    const int row = work_.first_row + place;
    if (row >= work_.rows) return;
    const QueryRow query = work_.heads(static_cast<int>(call_.group)).query_of(row);
    const RowResult<float> result =
        finish_row(call_.rules, query.head, total.maximum * params_.forward.natural, total.sum,
                   exp2f(kWeightShift<Half>));
    if (total.sum != 0) memory_.factors[place] = result.weight;
    if (call_.lse.data == nullptr) return;
    store_lse(call_.lse,
              call_.sequences[work_.sequence].lse + query.token * call_.lse.token_stride +
                  query.head * call_.lse.head_stride,
              result.lse);
  }
  __device__ __forceinline__ void store_state(int place, int segment,
                                              const RowState<float>& state) const {
    const Partials<float>& partials = params_.forward.partials;
    const int row = work_.first_row + place;
    if (row >= work_.rows) return;
    const std::int64_t index =
        partials.index(work_.sequence * call_.num_kv_heads + work_.kv_head, segment, row);
    partials.maximum[index] = state.maximum;
    partials.sum[index] = state.sum;
  }

  /// The weights can be read, with all that goes with them.
  __device__ __forceinline__ void publish_weights() {
    publish_writes();
    __syncwarp();
    if (lane() == 0) memory_.weights_barriers.full.arrive();
    ++stored_;
  }
  /// And multiplied: no scores are.
  __device__ __forceinline__ void let_sum() {
    if (lane() == 0) memory_.may_sum.arrive();
  }

  const LatentParams& params_;
  const AttentionParams& call_;
  LatentMemory& memory_;
  const LatentWork& work_;
  std::uint32_t queries_[kRegisterSteps][4];
  unsigned scored_ = 0;  // blocks
  unsigned stored_ = 0;  // blocks of weights
};

}  // namespace ladon::cuda::hopper
