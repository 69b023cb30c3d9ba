// Scores of the decode kernels over quantised caches: those of 8 or 16 query rows and a block of 64
// keys, in the registers of a warp's threads, as ForwardScores has them of 16 rows. The arithmetic
// is the same, step by step. Only rows that exist in groups of 8 are computed, and a block comes in
// two halves of 32 keys.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

template <class Half, int kRowGroups>
class ScaledSoftmax {
  using Wide = __nv_bfloat16;  // of weights times their scales, which need its range

 public:
  static constexpr int kTileGroups = kKeyGroups / 2;
  /// [n][2 i + e] is of row lane / 4 + 8 i and key 8 n + 2 (lane % 4) + e of a block.
  using Scores = float[kKeyGroups][2 * kRowGroups];

  /// The keys that the rows' windows leave, first and behind the last.
  using Windows = int2[8 * kRowGroups];

  /// The caller synchronizes the warp before apply_window().
  __device__ __forceinline__ ScaledSoftmax(const ForwardParams<float>& params,
                                           const Sequence& sequence, int rows, Windows& windows)
      : params_(params), windows_(windows) {
    if (lane() >= 8 * kRowGroups) return;
    KeyRange window{};
    if (lane() < rows) {
      window = window_of(params.call.rules, sequence, lane() / params.call.group);
    }
    windows[lane()] =
        make_int2(static_cast<int>(window.begin),
                  static_cast<int>(window.end > window.begin ? window.end : window.begin));
  }

  /// The upper half of a block becomes the lower one.
  __device__ __forceinline__ static void move_up(Scores& scores) {
#pragma unroll
    for (int n = 0; n < kTileGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) scores[n][e] = scores[kTileGroups + n][e];
    }
  }

  /// Products become the scores of a block's upper half.
  __device__ __forceinline__ void apply_scales(Scores& scores,
                                               const float (&products)[kTileGroups][4],
                                               const float* key_scales) const {
    const float scale = static_cast<float>(params_.call.rules.scale);
#pragma unroll
    for (int n = 0; n < kTileGroups; ++n) {
      const float2 of_keys = scales_of(key_scales, n);
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) {
        scores[kTileGroups + n][e] = products[n][e] * (e % 2 == 0 ? of_keys.x : of_keys.y) * scale;
      }
    }
  }

  /// `first` is the block's first key, counted from the sequence's first that is held.
  __device__ __forceinline__ void apply_window(Scores& scores, int first) const {
    int2 windows[kRowGroups];
    bool is_whole = true;
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      windows[i] = windows_[lane() / 4 + i * 8];
      is_whole = is_whole && first >= windows[i].x && first + kBlockKeys <= windows[i].y;
    }
    if (is_whole) return;
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) {
        const int key = first + n * 8 + member() * 2 + e % 2;
        if (key < windows[e / 2].x || key >= windows[e / 2].y) scores[n][e] = -INFINITY;
      }
    }
  }

  /// One bit for each score that is masked. Most blocks have none.
  __device__ __forceinline__ static unsigned masked_of(const Scores& scores) {
    unsigned masked = 0;
    float least = scores[0][0];
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) least = fminf(least, scores[n][e]);
    }
    if (!__any_sync(0xffffffffU, least == -INFINITY)) return 0;
#pragma unroll
    for (int i = 0; i < kKeyGroups * 2 * kRowGroups; ++i) {
      if (scores[i / (2 * kRowGroups)][i % (2 * kRowGroups)] == -INFINITY) masked |= 1U << i;
    }
    return masked;
  }

  /// Scores become weights, which are added to the rows' sums. `rescale` is what all that was
  /// summed before must be multiplied by: a maximum may have grown.
  __device__ __forceinline__ void weigh(Scores& scores, float (&rescale)[kRowGroups]) {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) {
      RowState<float>& state = states_[i];
      float largest = state.maximum;
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
        largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
      }
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
      // The first maximum is always taken: the difference is infinite, or NaN where there is none.
      const bool grows = !((largest - state.maximum) * params_.factor <= kMaximumSlack);
      const float maximum = grows ? largest : state.maximum;
      const float base = maximum == -INFINITY ? 0.0F : maximum;
      rescale[i] = maximum == state.maximum
                       ? 1.0F
                       : exp2_approximate((state.maximum - base) * params_.factor);
      state.maximum = maximum;
      state.sum *= rescale[i];
      const float reference = base * params_.factor;
      // Larger scores are subtracted from the maximum exactly; the others, from 0.
      const bool is_fused = fabsf(reference) <= kLargestFused;
      const float offset = is_fused ? kWeightShift<Half> - reference : kWeightShift<Half>;
      if (!__all_sync(0xffffffffU, is_fused)) subtract(scores, i, is_fused ? 0.0F : base);
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& score = scores[n][i * 2 + e];
          score = exp2_approximate(fmaf(score, params_.factor, offset));
          state.sum += score;
        }
      }
    }
  }

  /// Of a block's lower half. A scale may be NaN, and masked keys must not bring it in.
  __device__ __forceinline__ void scale_weights(Scores& weights, unsigned masked,
                                                const float* value_scales) const {
#pragma unroll
    for (int n = 0; n < kTileGroups; ++n) {
      const float2 of_keys = scales_of(value_scales, n);
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) {
        weights[n][e] *= e % 2 == 0 ? of_keys.x : of_keys.y;
      }
    }
    if (!__any_sync(0xffffffffU, masked != 0)) return;
#pragma unroll
    for (int n = 0; n < kTileGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2 * kRowGroups; ++e) {
        if ((masked >> (n * 2 * kRowGroups + e) & 1U) != 0) weights[n][e] = 0;
      }
    }
  }

  /// Weights of 16 keys as two bf16: what the first rounds off is in the second.
  struct Weights {
    unsigned rounded[kRowGroups][2];
    unsigned rests[kRowGroups][2];

    __device__ __forceinline__ Weights(const Scores& weights, int first) {
#pragma unroll
      for (int i = 0; i < kRowGroups; ++i) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float low = weights[first + n][i * 2];
          const float high = weights[first + n][i * 2 + 1];
          rounded[i][n] = pack<Wide>(low, high);
          rests[i][n] = pack<Wide>(low - static_cast<float>(Wide(low)),
                                   high - static_cast<float>(Wide(high)));
        }
      }
    }
  };

  /// Sums of all of a row's keys, in all of its four lanes.
  __device__ __forceinline__ void finish() {
#pragma unroll
    for (int i = 0; i < kRowGroups; ++i) states_[i] = row_sum(states_[i]);
  }
  __device__ __forceinline__ const RowState<float>& state(int i) const { return states_[i]; }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int member() { return lane() % 4; }

  /// Of the thread's two keys in group n of a tile.
  __device__ __forceinline__ float2 scales_of(const float* scales, int n) const {
    return *reinterpret_cast<const float2*>(scales + n * 8 + member() * 2);
  }

  __device__ __forceinline__ static void subtract(Scores& scores, int i, float base) {
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) scores[n][i * 2 + e] -= base;
    }
  }

  const ForwardParams<float>& params_;
  const Windows& windows_;
  RowState<float> states_[kRowGroups];
};

}  // namespace ladon::cuda
