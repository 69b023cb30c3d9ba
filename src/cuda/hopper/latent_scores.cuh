// The warpgroup of Hopper's latent kernel that computes scores and weights.
#pragma once

#include <cstdint>

#include "cuda/hopper/latent_copier.cuh"
#include "cuda/hopper/latent_tile.cuh"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tile_elements.cuh"

namespace ladon::cuda::hopper {

/// Four 8 x 8 matrices to shared memory; as load_matrices().
__device__ __forceinline__ void store_matrices(std::uint32_t address,
                                               const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

template <class Half>
class LatentScores {
 public:
  using Scores = ForwardScores<Half, ForwardRules::kWindow>;

  __device__ __forceinline__ LatentScores(const LatentParams& params, LatentMemory& memory)
      : params_(params),
        call_(params.forward.call),
        memory_(memory),
        work_(memory.work),
        copier_(params, memory) {}

  __device__ __forceinline__ void run() {
    for (int number = static_cast<int>(blockIdx.x); number < params_.schedule.tasks;
         number = work_.index + static_cast<int>(gridDim.x)) {
      take_work(params_, memory_, number, thread() == 0);
      if (uniform(work_.blocks.begin) == uniform(work_.blocks.end)) {
        if (thread() < kLatentRows && params_.schedule.parts == 1) finish_row_of(thread(), {});
        continue;
      }
      latents_.make_uniform();
      rope_.make_uniform();
      if (copies()) copier_.start(latents_.stage());
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
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x)) % 32; }
  __device__ __forceinline__ static int warp() { return thread() / 32; }
  __device__ __forceinline__ static bool copies() { return uniform(warp()) == 0; }
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
        read[box][i] = row < work_.rows && column < call_.head_dim
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
    NoStagedScores none;
    Scores rules(params_.forward, call_.sequences[work_.sequence],
                 work_.heads(static_cast<int>(call_.group)),
                 work_.first_row + warp() * 16 + lane() / 4, work_.rows, none);
    RowState<float> segment[2];
    float scores[kKeyGroups][4];
    std::uint32_t weights[kWeightSteps][4];
    int block = uniform(work_.blocks.begin);
    const int end = uniform(work_.blocks.end);
    start_scores(scores, block);
    finish_scores(scores);
    for (; block + 1 < end; ++block) {
      const float2 rescale = weigh(rules, scores, block, segment, weights);
      store_weights(weights, rescale);
      if ((block + 1) % kSegmentBlocks == 0) finish_segment(segment, block, false);
      publish_weights();
      start_scores(scores, block + 1);
      // The sums are done with the block before, so another takes its place.
      if (copies()) {
        copier_.advance(block + 2);
        if (block != work_.blocks.begin) copier_.copy_latents(latents_.stage());
      }
      finish_scores(scores);
      post_weights();
    }
    const float2 rescale = weigh(rules, scores, block, segment, weights);
    store_weights(weights, rescale);
    finish_segment(segment, block, true);
    publish_weights();
    post_weights();
  }

  /// Scores of a block become weights, rounded. Returns by what the sums must be multiplied before
  /// they are added.
  __device__ __forceinline__ float2 weigh(Scores& rules, float (&scores)[kKeyGroups][4], int block,
                                          RowState<float> (&segment)[2],
                                          std::uint32_t (&weights)[kWeightSteps][4]) {
    if (block < work_.whole.begin || block >= work_.whole.end) {
      rules.apply_rules(scores, block, nullptr);
    }
    if (block % kSegmentBlocks == 0) {
      segment[0] = {};
      segment[1] = {};
    }
    const float2 rescale = rules.template weigh<false>(scores, segment);
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      rounded_weights<Half>(scores, step, weights[step]);
    }
    return rescale;
  }

  /// S = Q K^T.
  __device__ __forceinline__ void start_scores(float (&scores)[kKeyGroups][4], int block) {
    Barrier& rope_full = memory_.rope_barriers.full;
    memory_.latents_full[latents_.stage()].wait(latents_.filled());
    const int first = block * kBlockKeys - uniform(work_.origin);
    const int kv_len = uniform(work_.kv_len);
    if (first < 0 || first + kBlockKeys > kv_len) {
      rope_full.wait(rope_.filled());
      clear_missing(first, kv_len);
    }
    const TileOperand keys(shared_address(memory_.latents[latents_.stage()]), kBoxBytes);
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
    rope_full.wait(rope_.filled());
    begin_products();
#pragma unroll
    for (int step = 0; step < kBoxSteps; ++step) {
      start_product<Half, true>(scores, queries.descriptor(kBoxBytes + step * 32),
                                rope.descriptor(step * 32));
    }
    commit_products();
    latents_.advance();
    rope_.advance();
  }
  __device__ __forceinline__ void finish_scores(float (&scores)[kKeyGroups][4]) {
    finish_products<0>();
    hold_in_place(scores);
    __syncwarp();
    Barrier& rope_empty = memory_.rope_barriers.empty;
    if (lane() == 0) rope_empty.arrive();
    if (!copies()) return;
    rope_empty.wait(rope_.filled() ^ 1U);
    copier_.copy_rope();
  }

  /// Latents that are not the sequence's become 0: their weights are, and 0 * NaN is not.
  __device__ __forceinline__ void clear_missing(int first, int kv_len) {
    constexpr int kChunks = kBoxBytes / 16;
    const unsigned latents = shared_address(memory_.latents[latents_.stage()]);
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

  /// Until the sums have used all weights that were stored.
  __device__ __forceinline__ void wait_for_free_weights() {
    memory_.weights_barriers.empty.wait((blocks_ & 1U) ^ 1U);
  }

  __device__ __forceinline__ void store_weights(const std::uint32_t (&weights)[kWeightSteps][4],
                                                float2 rescale) {
    wait_for_free_weights();
    const unsigned to =
        shared_address(memory_.weights) + swizzled_offset(warp() * 16 + lane() % 16, lane() / 16);
#pragma unroll
    for (int step = 0; step < kWeightSteps; ++step) {
      store_matrices(to ^ static_cast<unsigned>(step << 5), weights[step]);
    }
    if (lane() % 4 != 0) return;
    float* const factors = memory_.rescale + warp() * 16 + lane() / 4;
    factors[0] = rescale.x;
    factors[8] = rescale.y;
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
        memory_.folds[place] = {-1, added.sum == 0 ? -1.0F : 1.0F};
        store_state(place, block / kSegmentBlocks - work_.first_segment, added);
        continue;
      }
      RowState<float>& total = memory_.totals[place];
      if (block / kSegmentBlocks == work_.blocks.begin / kSegmentBlocks) total = {};
      const Fold<float> fold(total, added, Base2Exp{params_.forward.factor});
      total = fold.state;
      memory_.folds[place] = {fold.takes_earlier ? fold.earlier : -1.0F,
                              fold.takes_segment ? fold.segment : -1.0F};
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

  __device__ __forceinline__ void publish_weights() {
    publish_writes();
    __syncwarp();
    ++blocks_;
  }
  __device__ __forceinline__ void post_weights() {
    if (lane() == 0) memory_.weights_barriers.full.arrive();
  }

  const LatentParams& params_;
  const AttentionParams& call_;
  LatentMemory& memory_;
  const LatentWork& work_;
  LatentCopier copier_;
  std::uint32_t queries_[kRegisterSteps][4];
  RingPosition<LatentMemory::kStages> latents_;
  RingPosition<1> rope_;
  unsigned blocks_ = 0;  // whose weights were stored
};

}  // namespace ladon::cuda::hopper
