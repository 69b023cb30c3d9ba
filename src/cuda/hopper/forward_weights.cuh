// Weights of Hopper's forward kernel: the arithmetic of ForwardScores::weigh(), in a form for
// blocks that raise no row's maximum, which most are, and in one of little code for the others.
#pragma once

#include "cuda/kernels/forward_scores.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kWeightSteps = kBlockKeys / 16;

/// A row's weights are exp2(score * factor + offset) as long as its maximum stays. NaN where it has
/// none yet, or one too large for that.
template <class Half>
__device__ __forceinline__ float offset_of(const RowState<float>& state, float factor) {
  const float reference = state.maximum * factor;
  return fabsf(reference) <= kLargestFused ? kWeightShift<Half> - reference : NAN;
}

/// Weights of a block as an operand of products, without a look at the maxima. Returns whether they
/// stay: sums that hardly grow have no weight of a score that would raise them. Else nothing has
/// changed.
template <class Half>
__device__ __forceinline__ bool weigh_below(const float (&scores)[kKeyGroups][4], float factor,
                                            const float (&offset)[2], RowState<float> (&states)[2],
                                            unsigned (&rounded)[kWeightSteps][4]) {
  constexpr float kMost = kWeightShift<Half> == 0 ? 0x1p7F : 0x1p14F;
  static_assert(kMaximumSlack == 8 && (kWeightShift<Half> == 0 || kWeightShift<Half> == 7));
  float sums[2] = {states[0].sum, states[1].sum};
#pragma unroll
  for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float first = exp2_approximate(fmaf(scores[n][row * 2], factor, offset[row]));
      const float second = exp2_approximate(fmaf(scores[n][row * 2 + 1], factor, offset[row]));
      sums[row] += first;
      sums[row] += second;
      rounded[n / 2][n % 2 * 2 + row] = pack<Half>(first, second);
    }
  }
  const bool stays = sums[0] - states[0].sum <= kMost && sums[1] - states[1].sum <= kMost;
  if (!__all_sync(0xffffffffU, stays)) return false;
  states[0].sum = sums[0];
  states[1].sum = sums[1];
  return true;
}

/// Weights of any block, which take the place of its scores. Returns by what all that was summed
/// before must be multiplied. ForwardScores::weigh() with one subtraction more a score, of 0 where
/// it would fuse, instead of code for either case.
template <class Half>
__device__ __forceinline__ float2 weigh_any(float (&scores)[kKeyGroups][4], float factor,
                                            RowState<float> (&states)[2]) {
  float subtracted[2];
  float offset[2];
  float rescale[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float largest = largest_score(scores, i, states[i].maximum);
    const MaximumStep step(states[i].maximum, largest, factor);
    rescale[i] = step.rescale;
    states[i].maximum = step.maximum;
    states[i].sum *= step.rescale;
    const float reference = step.base * factor;
    const bool is_fused = fabsf(reference) <= kLargestFused;
    subtracted[i] = is_fused ? 0.0F : step.base;
    offset[i] = is_fused ? kWeightShift<Half> - reference : kWeightShift<Half>;
  }
#pragma unroll
  for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      scores[n][e] =
          exp2_approximate(fmaf(scores[n][e] - subtracted[e / 2], factor, offset[e / 2]));
      states[e / 2].sum += scores[n][e];
    }
  }
  return make_float2(rescale[0], rescale[1]);
}

}  // namespace ladon::cuda::hopper
