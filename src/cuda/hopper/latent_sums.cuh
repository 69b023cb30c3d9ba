// The warpgroups of Hopper's latent kernel that sum weighted latents, 256 columns each.
#pragma once

#include <cstdint>

#include "cuda/hopper/latent_copier.cuh"
#include "cuda/hopper/latent_tile.cuh"
#include "cuda/hopper/wgmma_sum.cuh"
#include "cuda/kernels/forward_sums.cuh"

namespace ladon::cuda::hopper {

/// kTiles share copies.
template <class Half, int kTiles>
class LatentSums {
 public:
  __device__ __forceinline__ LatentSums(const LatentParams& params, LatentMemory& memory)
      : params_(params),
        call_(params.forward.call),
        memory_(memory),
        work_(memory.work),
        copier_(params, memory) {}

  __device__ __forceinline__ void run() {
    sums_.clear();
    for (int number = static_cast<int>(blockIdx.x); number < params_.schedule.tasks;
         number = uniform(work_.index) + static_cast<int>(gridDim.x)) {
      take_work<kTiles>(params_, memory_, number, false);
      if (uniform(work_.has_rows() ? 1 : 0) != 0) run_task();
    }
    if (kTiles > 1 && copies()) copier_.wait_for_others(blocks_);
  }

 private:
  static constexpr int kGroups = kSumColumns / 8;
  static constexpr int kFirstBarrier = 2;  // of the two warpgroups' named barriers

  /// Which of the two warpgroups this is.
  __device__ __forceinline__ static int half() {
    return uniform(static_cast<int>(fresh(threadIdx.x) / kGroupThreads) - 1);
  }
  __device__ __forceinline__ static int first_column() { return half() * kSumColumns; }
  __device__ __forceinline__ static int thread() {
    return static_cast<int>(fresh(threadIdx.x) % kGroupThreads);
  }
  __device__ __forceinline__ static int lane() { return static_cast<int>(fresh(threadIdx.x) % 32); }
  __device__ __forceinline__ static int warp() {
    return static_cast<int>(fresh(threadIdx.x) % kGroupThreads / 32);
  }
  __device__ __forceinline__ static bool copies() {
    return uniform(static_cast<int>(fresh(threadIdx.x) / 32)) == 2 * kGroupThreads / 32;
  }
  /// The thread's two rows of the tile are this one and 8 below.
  __device__ __forceinline__ static int row_of_thread() { return warp() * 16 + lane() / 4; }

  __device__ __forceinline__ void run_task() {
    blocks_ = static_cast<unsigned>(uniform(static_cast<int>(blocks_)));
    int block = uniform(work_.blocks.begin);
    if (copies() && block < uniform(work_.blocks.end)) copier_.start(blocks_);
    while (block < uniform(work_.blocks.end)) {
      const bool owes_rope =
          add_block(block == uniform(work_.blocks.begin) || block % kSegmentBlocks == 0);
      ++block;
      if (block < uniform(work_.blocks.end) && block % kSegmentBlocks != 0) {
        release_weights();
        release_latents();
      } else {
        finish_segment(block - 1);
      }
      if (owes_rope) copier_.next_rope(blocks_ + 1);
      if (copies()) copier_.next_latents(block + 2, blocks_ + 2);
    }
    if (work_.is_apart()) return;
    const bool has_keys = work_.blocks.begin < work_.blocks.end;
    if (has_keys) {
      const float* const factors = memory_.factors + row_of_thread();
      note_non_finite(!(factors[0] < 0), !(factors[8] < 0));
    }
    if (params_.schedule.parts == 1) {
      store_rows(has_keys);
    } else if (has_keys) {
      store_partial(params_.schedule.part_segments - 1);
    }
  }

  /// O += P V. Returns whether the last columns of the block after the next are still to be copied:
  /// the memory is not free where these sums come before the next block's scores.
  __device__ __forceinline__ bool add_block(bool is_first) {
    memory_.weights_barriers.full.wait(blocks_ & 1U);
    if (!is_first) {
      const float* const factors = memory_.rescale[blocks_ & 1U] + row_of_thread();
      sums_.rescale(make_float2(factors[0], factors[8]));
    }
    const TileOperand weights(shared_address(memory_.weights), kBoxBytes);
    const TileOperand values(shared_address(memory_.latents[stage()][half() * kHalfBoxes]),
                             kBoxBytes);
    auto& halves = reinterpret_cast<float(&)[2][kGroups / 2][4]>(sums_.accumulators());
    memory_.may_sum.wait(blocks_ & 1U);
    const bool is_rope_free = copies() && copier_.is_rope_free(blocks_ + 2);
    if (is_rope_free) copier_.next_rope(blocks_ + 2);
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
    return copies() && !is_rope_free;
  }

  /// The block's weights, its fold and its factors are no longer needed.
  __device__ __forceinline__ void release_weights() {
    __syncwarp();
    if (lane() == 0) memory_.weights_barriers.empty.arrive();
  }
  /// Nor are its latents.
  __device__ __forceinline__ void release_latents() {
    __syncwarp();
    const Barrier& empty = memory_.latents_empty[stage()];
    if (lane() < kTiles) arrive_at(empty, static_cast<unsigned>(lane()));
    ++blocks_;
  }
  __device__ __forceinline__ int stage() const {
    return static_cast<int>(blocks_ % LatentMemory::kStages);
  }

  __device__ __forceinline__ void finish_segment(int block) {
    const RowFold* const folds = memory_.folds + row_of_thread();
    const RowFold both[2] = {folds[0], folds[8]};
    release_weights();
    if (work_.is_apart()) {
      release_latents();
      store_partial(block / kSegmentBlocks - work_.first_segment);
      note_non_finite(both[0].segment != 0, both[1].segment != 0);
      return;
    }
    const bool is_first = block / kSegmentBlocks == work_.blocks.begin / kSegmentBlocks;
    const bool is_last = block + 1 == work_.blocks.end;
    if (!is_first) {
      fold<true>(both, !is_last);
    } else if (!is_last) {
      fold<false>(both, true);
    }
    release_latents();
  }

  /// Folds in the sums of earlier segments, and leaves all for later ones. They are in global
  /// memory, in the L2 cache mostly. Half of them are on their way at any time, to where the
  /// latents were that this warpgroup has just summed. Each thread reads and writes its own.
  template <bool kReads>
  __device__ __forceinline__ void fold(const RowFold (&folds)[2], bool writes) {
    constexpr int kAtOnce = 2;
    constexpr int kChunks = kGroups / kAtOnce;
    constexpr int kAhead = kHalfBoxes * kBoxBytes / (kGroupThreads * kAtOnce * 16);
    // The others of the warpgroup may still be summing.
    if constexpr (kReads) sync_threads(kFirstBarrier + half(), kGroupThreads);
    if (uniform(work_.first_row + warp() * 16) >= uniform(work_.rows)) return;
    float4* const earlier =
        params_.earlier + (static_cast<int>(blockIdx.x) * 2 + half()) * (kGroups * kGroupThreads) +
        thread();
    const std::uint32_t landed =
        shared_address(memory_.latents[stage()][half() * kHalfBoxes]) + thread() * 16;
    const auto request = [&](int chunk) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        copy_async_16(landed + (chunk % kAhead * kAtOnce + i) * (kGroupThreads * 16),
                      earlier + (chunk * kAtOnce + i) * kGroupThreads, 16);
      }
    };
    if constexpr (kReads) {
#pragma unroll
      for (int chunk = 0; chunk < kAhead; ++chunk) {
        request(chunk);
        commit_copies();
      }
    }
    auto& sums = sums_.accumulators();
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
      if constexpr (kReads) {
        wait_for_copies<kAhead - 1>();
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float4 before =
              load_four(landed + (chunk % kAhead * kAtOnce + i) * (kGroupThreads * 16));
          float(&four)[4] = sums[chunk * kAtOnce + i];
          four[0] = folds[0](before.x, four[0]);
          four[1] = folds[0](before.y, four[1]);
          four[2] = folds[1](before.z, four[2]);
          four[3] = folds[1](before.w, four[3]);
          hold_in_place(four);  // read before the next copy comes
        }
        if (chunk + kAhead < kChunks) request(chunk + kAhead);
        commit_copies();
      }
      if (writes) {
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const float(&four)[4] = sums[chunk * kAtOnce + i];
          earlier[(chunk * kAtOnce + i) * kGroupThreads] =
              make_float4(four[0], four[1], four[2], four[3]);
        }
      }
      asm volatile("" ::: "memory");
    }
    if constexpr (kReads) publish_writes();
  }
  __device__ __forceinline__ static float4 load_four(std::uint32_t address) {
    float4 four;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(four.x), "=f"(four.y), "=f"(four.z), "=f"(four.w)
                 : "r"(address)
                 : "memory");
    return four;
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
    const int column = first_column() + lane() % 4 * 2;  // by all lanes: rows may not exist
    auto& sums = sums_.accumulators();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = work_.first_row + row_of_thread() + i * 8;
      if (row >= work_.rows) continue;
      const std::int64_t index =
          partials.index(work_.sequence * call_.num_kv_heads + work_.kv_head, segment, row);
      float* out = partials.out + index * call_.value_dim + column;
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        *reinterpret_cast<float2*>(out + n * 8) = make_float2(sums[n][i * 2], sums[n][i * 2 + 1]);
      }
    }
  }

  /// The thread's two rows, times their factors; 0 where they saw no key. One after the other in a
  /// loop: the compiler would compute both addresses first, for which there are no registers.
  __device__ __forceinline__ void store_rows(bool has_keys) {
#pragma unroll 1
    for (int place = row_of_thread(), i = 0; i < 2; ++i, place += 8) {
      const float factor = has_keys ? memory_.factors[place] : -1.0F;
      const unsigned seen = factor < 0 ? 0U : ~0U;
      const int row = work_.first_row + place;
      const auto group = static_cast<unsigned>(call_.group);
      const unsigned token = static_cast<unsigned>(row) / group;
      const unsigned head = static_cast<unsigned>(work_.kv_head) * group + (row - token * group);
      Half* const out = static_cast<Half*>(call_.out.data) + call_.sequences[work_.sequence].out +
                        token * call_.out.token_stride + head * call_.out.head_stride +
                        first_column() + lane() % 4 * 8;
      auto& sums = sums_.accumulators();
      // The row's four lanes exchange pairs, so that lane t has the eight columns of groups 4 m +
      // t.
#pragma unroll
      for (int first = 0; first < kGroups; first += 4) {
        unsigned pairs[4];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float(&four)[4] = sums[first + n];
          pairs[n] = pack<Half>(result_of(i == 0 ? four[0] : four[2], factor),
                                result_of(i == 0 ? four[1] : four[3], factor)) &
                     seen;
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
  LatentCopier<kTiles> copier_;
  ForwardSums<Half, kGroups> sums_{kSumColumns};
  unsigned blocks_ = 0;  // that were summed
};

}  // namespace ladon::cuda::hopper
