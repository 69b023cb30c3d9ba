// The warpgroups of Hopper's latent kernel that sum weighted latents, 256 columns each.
#pragma once

#include <cstdint>

#include "cuda/hopper/latent_tile.cuh"
#include "cuda/hopper/wgmma_sum.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

template <class Half>
class LatentSums {
 public:
  __device__ __forceinline__ LatentSums(const LatentParams& params, LatentMemory& memory)
      : params_(params), call_(params.forward.call), memory_(memory), work_(memory.work) {}

  __device__ __forceinline__ void run() {
    sums_.clear();
    for (int number = static_cast<int>(blockIdx.x); number < params_.schedule.tasks;
         number = work_.index + static_cast<int>(gridDim.x)) {
      take_work(params_, memory_, number, false);
      if (uniform(work_.has_rows() ? 1 : 0) != 0) run_task();
    }
  }

 private:
  static constexpr int kGroups = kSumColumns / 8;

  /// Which of the two warpgroups this is.
  __device__ __forceinline__ static int half() {
    return uniform(static_cast<int>(fresh(threadIdx.x)) / kGroupThreads - 1);
  }
  __device__ __forceinline__ static int first_column() { return half() * kSumColumns; }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x)) % kGroupThreads;
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x)) % 32; }
  /// The thread's two rows of the tile are this one and 8 below.
  __device__ __forceinline__ static int row_of_thread() { return thread() / 32 * 16 + lane() / 4; }

  __device__ __forceinline__ void run_task() {
    blocks_ = static_cast<unsigned>(uniform(static_cast<int>(blocks_)));
    int block = uniform(work_.blocks.begin);
    while (block < uniform(work_.blocks.end)) {
      add_block(block == uniform(work_.blocks.begin) || block % kSegmentBlocks == 0);
      ++block;
      if (block < uniform(work_.blocks.end) && block % kSegmentBlocks != 0) {
        release();
      } else {
        finish_segment(block - 1);
      }
    }
    if (work_.is_apart()) return;
    const bool has_keys = work_.blocks.begin < work_.blocks.end;
    if (params_.schedule.parts == 1) {
      store_row<0>(has_keys);
      asm volatile("" ::: "memory");  // nothing is kept in registers from one to the other
      store_row<1>(has_keys);
    } else if (has_keys) {
      store_partial(params_.schedule.part_segments - 1);
    }
    if (has_keys) {
      const float* const factors = memory_.factors + row_of_thread();
      note_non_finite(!(factors[0] < 0), !(factors[8] < 0));
    }
  }

  /// O += P V.
  __device__ __forceinline__ void add_block(bool is_first) {
    memory_.weights_barriers.full.wait(blocks_ & 1U);
    if (!is_first) {
      const float* const factors = memory_.rescale + row_of_thread();
      sums_.rescale(make_float2(factors[0], factors[8]));
    }
    const TileOperand weights(shared_address(memory_.weights), kBoxBytes);
    const TileOperand values(
        shared_address(memory_.latents[blocks_ % LatentMemory::kStages][half() * kHalfBoxes]),
        kBoxBytes);
    auto& halves = reinterpret_cast<float(&)[2][kGroups / 2][4]>(sums_.accumulators());
    hold_in_place(sums_.accumulators());
    begin_products();
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step) {
      const bool adds = step > 0 || !is_first;
      const int rows = step * 16 * kBoxRowBytes;
      const std::uint64_t a = weights.descriptor(step * 32);
      start_sum<Half>(halves[0], a, values.descriptor(rows), adds);
      start_sum<Half>(halves[1], a, values.descriptor(kHalfBoxes / 2 * kBoxBytes + rows), adds);
    }
    commit_products();
    finish_products<0>();
    hold_in_place(sums_.accumulators());
  }

  /// Weights and latents of the block are no longer needed.
  __device__ __forceinline__ void release() {
    __syncwarp();
    if (lane() == 0) memory_.weights_barriers.empty.arrive();
    ++blocks_;
  }

  __device__ __forceinline__ void finish_segment(int block) {
    const RowFold* const folds = memory_.folds + row_of_thread();
    const RowFold both[2] = {folds[0], folds[8]};
    release();
    if (work_.is_apart()) {
      store_partial(block / kSegmentBlocks - work_.first_segment);
      note_non_finite(both[0].takes_segment(), both[1].takes_segment());
    } else {
      const bool is_first = block / kSegmentBlocks == work_.blocks.begin / kSegmentBlocks;
      const bool is_last = block + 1 == work_.blocks.end;
      if (!is_first) {
        is_last ? fold<true, false>(both) : fold<true, true>(both);
      } else if (!is_last) {
        fold<false, true>(both);
      }
    }
  }

  /// Folds in the sums of earlier segments, and leaves all for later ones. They are in global
  /// memory, in the L2 cache mostly; a few are read at a time, for want of registers.
  template <bool kReads, bool kWrites>
  __device__ __forceinline__ void fold(const RowFold (&folds)[2]) {
    constexpr int kAtOnce = 4;
    float4* earlier = params_.earlier +
                      (static_cast<int>(blockIdx.x) * 2 + half()) * (kGroups * kGroupThreads) +
                      thread();
    auto& sums = sums_.accumulators();
#pragma unroll
    for (int first = 0; first < kGroups; first += kAtOnce) {
      if constexpr (kReads) {
        float4 before[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) before[i] = earlier[i * kGroupThreads];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float(&four)[4] = sums[first + i];
          four[0] = folds[0](before[i].x, four[0]);
          four[1] = folds[0](before[i].y, four[1]);
          four[2] = folds[1](before[i].z, four[2]);
          four[3] = folds[1](before[i].w, four[3]);
        }
      }
      if constexpr (kWrites) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float(&four)[4] = sums[first + i];
          earlier[i * kGroupThreads] = make_float4(four[0], four[1], four[2], four[3]);
        }
      }
      earlier += kAtOnce * kGroupThreads;
      asm volatile("" ::: "memory");  // or all would be read at once
    }
  }

  /// Where a row that saw keys has sums that are infinite or NaN.
  __device__ __forceinline__ void note_non_finite(bool sees_first, bool sees_second) {
    const int row = work_.first_row + row_of_thread();
    bool is_finite[2] = {true, true};
    auto& sums = sums_.accumulators();
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        is_finite[i] = is_finite[i] && fabsf(sums[n][i * 2]) <= FLT_MAX &&
                       fabsf(sums[n][i * 2 + 1]) <= FLT_MAX;
      }
    }
    if ((sees_first && row < work_.rows && !is_finite[0]) ||
        (sees_second && row + 8 < work_.rows && !is_finite[1])) {
      params_.unfinished[work_.index] = 1;
    }
  }

  __device__ __forceinline__ void store_partial(int segment) {
    const Partials<float>& partials = params_.forward.partials;
    auto& sums = sums_.accumulators();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = work_.first_row + row_of_thread() + i * 8;
      if (row >= work_.rows) continue;
      const std::int64_t index =
          partials.index(work_.sequence * call_.num_kv_heads + work_.kv_head, segment, row);
      float* out = partials.out + index * call_.value_dim + first_column() + lane() % 4 * 2;
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[n][i * 2], sums[n][i * 2 + 1]);
      }
    }
  }

  /// Row i of the thread's two, times its factor; 0 where it saw no key.
  template <int i>
  __device__ __forceinline__ void store_row(bool has_keys) {
    const int place = row_of_thread() + i * 8;
    const float factor = has_keys ? memory_.factors[place] : -1.0F;
    const bool is_seen = !(factor < 0);
    const int row = work_.first_row + place;
    const int group = static_cast<int>(fresh(static_cast<unsigned>(call_.group)));
    const QueryRow query = work_.heads(group).query_of(row);
    Half* const out = static_cast<Half*>(call_.out.data) + call_.sequences[work_.sequence].out +
                      query.token * call_.out.token_stride + query.head * call_.out.head_stride +
                      first_column() + lane() % 4 * 8;
    auto& sums = sums_.accumulators();
    // The row's four lanes exchange pairs, so that lane t has the eight columns of groups 4 m + t.
#pragma unroll
    for (int first = 0; first < kGroups; first += 4) {
      unsigned pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float(&four)[4] = sums[first + n];
        // -0 becomes 0.
        pairs[n] = pack<Half>(select(is_seen, four[i * 2] * factor + 0.0F, 0.0F),
                              select(is_seen, four[i * 2 + 1] * factor + 0.0F, 0.0F));
      }
      exchange<1>(pairs[0], pairs[1]);
      exchange<1>(pairs[2], pairs[3]);
      exchange<2>(pairs[0], pairs[2]);
      exchange<2>(pairs[1], pairs[3]);
      if (row < work_.rows) {
        *reinterpret_cast<uint4*>(out + first * 8) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    }
  }
  /// Of lanes that differ in bit kLane, the lower gives `high` for the other's `low`.
  template <int kLane>
  __device__ __forceinline__ static void exchange(unsigned& low, unsigned& high) {
    const bool is_upper = (lane() & kLane) != 0;
    const unsigned other = __shfl_xor_sync(0xffffffffU, is_upper ? low : high, kLane);
    (is_upper ? low : high) = other;
  }

  const LatentParams& params_;
  const AttentionParams& call_;
  LatentMemory& memory_;
  const LatentWork& work_;
  ForwardSums<Half, kGroups> sums_{kSumColumns};
  unsigned blocks_ = 0;  // that were summed
};

}  // namespace ladon::cuda::hopper
