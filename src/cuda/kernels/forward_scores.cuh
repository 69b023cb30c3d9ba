// Scores of the tensor-core forward kernels: those of a warp's 16 query rows and a block of 64
// keys, in the registers of its threads (forward_rules.cuh says which has what). Rules are applied
// to them here, and they become weights.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_rules.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

/// Weights are relative to a maximum that may be this much too small, as a power of two: as long as
/// it is, what was summed before need not be rescaled. Which keys raise it depends on the row
/// alone.
inline constexpr float kMaximumSlack = 8;
/// f16 has few exponents: weights are stored times 2^7, so that small ones keep their precision.
template <class Half>
inline constexpr float kWeightShift = std::is_same_v<Half, __half> ? 7.0F : 0.0F;
/// Scores up to this, as powers of two, take one multiply-add: maximum * factor is rounded first,
/// which is an error of 2^-17 at most. Larger ones are subtracted from the maximum exactly.
inline constexpr float kLargestFused = 256;

/// The weights of 16 keys, from 16 `step` on, as an operand of products.
template <class Half>
__device__ __forceinline__ void rounded_weights(const float (&weights)[kKeyGroups][4], int step,
                                                unsigned (&rounded)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float(&group)[4] = weights[step * 2 + i / 2];
    rounded[i] = pack<Half>(group[i % 2 * 2], group[i % 2 * 2 + 1]);
  }
}

/// What a row's weights of a block are relative to, and what all that was summed before must be
/// multiplied by.
struct MaximumStep {
  float maximum;
  float base;  // the maximum, or 0 where no key was seen
  float rescale;

  /// `before` is the row's maximum so far, `largest` that of it and the block's scores.
  __device__ __forceinline__ MaximumStep(float before, float largest, float factor) {
    // The first maximum is always taken: the difference is infinite, or NaN where there is none.
    const bool grows = !((largest - before) * factor <= kMaximumSlack);
    maximum = grows ? largest : before;
    base = maximum == -INFINITY ? 0.0F : maximum;
    rescale = maximum == before ? 1.0F : exp2_approximate((before - base) * factor);
  }
};

/// The largest of a row's maximum so far and its scores of a block, of all four threads that have
/// some of its keys. Row i of a thread's two.
__device__ __forceinline__ float largest_score(const float (&scores)[kKeyGroups][4], int i,
                                               float before) {
  float largest = before;
#pragma unroll
  for (int n = 0; n < kKeyGroups; ++n) {
    largest = fmaxf(largest, fmaxf(scores[n][i * 2], scores[n][i * 2 + 1]));
  }
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
}

/// Weights of a row are exp2 of this.
template <class Half>
struct WeightPower {
  float factor;
  float base;
  float offset;
  bool is_fused;

  __device__ __forceinline__ WeightPower(float base_of_row, float factor_of_scores)
      : factor(factor_of_scores), base(base_of_row) {
    const float reference = base * factor;
    is_fused = fabsf(reference) <= kLargestFused;
    offset = kWeightShift<Half> - reference;
  }
  __device__ __forceinline__ float fused(float score) const { return fmaf(score, factor, offset); }
  __device__ __forceinline__ float operator()(float score) const {
    return is_fused ? fused(score) : fmaf(score - base, factor, kWeightShift<Half>);
  }
};

/// A row's state by one thread, of the four that have some of its keys, becomes that of them all.
__device__ __forceinline__ RowState<float> row_sum(RowState<float> state) {
  state.sum += __shfl_xor_sync(0xffffffffU, state.sum, 1);
  state.sum += __shfl_xor_sync(0xffffffffU, state.sum, 2);
  return state;
}

/// A thread's rows: `first_row` and the one 8 below, of the sequence's `rows`.
__device__ __forceinline__ ThreadRows find_rows(const ScoreRules& rules, const Sequence& sequence,
                                                const RowHeads& heads, int first_row, int rows) {
  ThreadRows found;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + i * 8;
    if (!is_row(row, rows)) continue;
    const QueryRow query = heads.query_of(row);
    found.token[i] = static_cast<int>(query.token);
    found.head[i] = static_cast<int>(query.head);
    const KeyRange window = window_of(rules, sequence, found.token[i]);
    found.begin[i] = static_cast<int>(window.begin);
    found.end[i] = static_cast<int>(window.end > window.begin ? window.end : window.begin);
  }
  return found;
}

/// The thread's rows in registers, or found anew whenever they are needed.
template <bool kKept>
class RowsOfThread {
 public:
  __device__ __forceinline__ RowsOfThread(const ScoreRules& rules, const Sequence& sequence,
                                          const RowHeads& heads, int first_row, int rows)
      : rows_(find_rows(rules, sequence, heads, first_row, rows)) {}
  __device__ __forceinline__ const ThreadRows& get(const ScoreRules& /*rules*/,
                                                   const Sequence& /*sequence*/) const {
    return rows_;
  }

 private:
  ThreadRows rows_;
};
template <>
class RowsOfThread<false> {
 public:
  __device__ __forceinline__ RowsOfThread(const ScoreRules& /*rules*/, const Sequence& /*sequence*/,
                                          const RowHeads& heads, int first_row, int /*rows*/)
      : heads_(heads), first_row_(first_row) {}
  __device__ __forceinline__ ThreadRows get(const ScoreRules& rules,
                                            const Sequence& sequence) const {
    return find_rows(rules, sequence, heads_,
                     static_cast<int>(fresh(static_cast<unsigned>(first_row_))),
                     static_cast<int>(sequence.query_len) * heads_.heads);
  }

 private:
  const RowHeads& heads_;
  const int first_row_;
};

/// kKeepsRows: in registers.
template <class Half, ForwardRules kRules, bool kKeepsRows = true>
class ForwardScores {
  static constexpr bool kAll = kRules == ForwardRules::kAll;

 public:
  using Scores = ThreadScores;

  /// `first_row` is the thread's first, of the sequence's `rows`.
  __device__ __forceinline__ ForwardScores(const ForwardParams<float>& params,
                                           const Sequence& sequence, const RowHeads& heads,
                                           int first_row, int rows)
      : params_(params),
        rules_(params.call.rules),
        sequence_(sequence),
        lane_(static_cast<int>(threadIdx.x) % 32),
        rows_(rules_, sequence, heads, first_row, rows) {}

  /// Which of the current block's keys the rows do not see, one bit for each score.
  __device__ __forceinline__ unsigned masked() const { return masked_; }

  /// Products q k become scores.
  __device__ __forceinline__ void apply_rules(Scores& scores, int block, const float* key_scales) {
    const int first = first_key(block);
    if constexpr (kRules == ForwardRules::kWindow) {
      apply_window(scores, first);
    } else {
      apply_scales(scores, key_scales);
      if (!params_.only_scales) rules_of(first).apply(scores);
      apply_window(scores, first);
    }
  }

  /// Scores become weights, which are added to the rows' sums. Returns by what all that was summed
  /// before must be multiplied: a maximum may have grown. kMasks: masked() is wanted.
  template <bool kMasks>
  __device__ __forceinline__ float2 weigh(Scores& scores, RowState<float> (&states)[2]) {
    if constexpr (kMasks) note_masked(scores);
    const auto step_of = [&](int i) {
      const float largest = largest_score(scores, i, states[i].maximum);
      const MaximumStep step(states[i].maximum, largest, params_.factor);
      states[i].maximum = step.maximum;
      states[i].sum *= step.rescale;
      return step;
    };
    const MaximumStep steps[2] = {step_of(0), step_of(1)};
    const WeightPower<Half> powers[2] = {{steps[0].base, params_.factor},
                                         {steps[1].base, params_.factor}};
    if (__all_sync(0xffffffffU, powers[0].is_fused && powers[1].is_fused)) {
      add_weights(scores, states, [&](float score, int row) { return powers[row].fused(score); });
    } else {
      add_weights(scores, states, [&](float score, int row) { return powers[row](score); });
    }
    return make_float2(steps[0].rescale, steps[1].rescale);
  }

  /// Dropout, and the scales of quantised values. A scale may be NaN, and masked keys must not
  /// bring it in.
  __device__ __forceinline__ void scale_weights(Scores& weights, int block,
                                                const float* value_scales) {
    if constexpr (kAll) {
      if (rules_.dropout) drop(weights, kept(block));
      if (is_scaled()) apply_value_scales(weights, value_scales);
    }
  }

  /// Dropout alone, where there is some: which weights of a block are kept, and what becomes of
  /// all.
  __device__ __forceinline__ unsigned kept(int block) const {
    return rules_of(first_key(block)).kept();
  }
  __device__ __forceinline__ void drop(Scores& weights, unsigned kept) const {
    BlockRules::drop(weights, kept);
  }

 private:
  /// exp2(power_of(score, row)) for each score.
  template <class Power>
  __device__ __forceinline__ static void add_weights(Scores& scores, RowState<float> (&states)[2],
                                                     const Power& power_of) {
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        scores[n][e] = exp2_approximate(power_of(scores[n][e], e / 2));
        states[e / 2].sum += scores[n][e];
      }
    }
  }

  __device__ __forceinline__ void note_masked(const Scores& scores) {
    masked_ = 0;
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i) {
      if (scores[i / 4][i % 4] == -INFINITY) masked_ |= 1U << i;
    }
  }

  __device__ __forceinline__ bool is_scaled() const {
    return params_.call.kv_layout.k_scales != nullptr;
  }
  __device__ __forceinline__ BlockRules rules_of(int first) const {
    static_assert(kKeepsRows);
    return {rules_, sequence_, rows_.get(rules_, sequence_), first,
            static_cast<int>(fresh(threadIdx.x)) % 32};
  }
  __device__ __forceinline__ bool is_masked(int i) const { return (masked_ >> i & 1U) != 0; }

  /// Keys are counted from the sequence's first that is held.
  __device__ __forceinline__ int first_key(int block) const {
    return static_cast<int>(static_cast<std::int64_t>(block) * kBlockKeys - sequence_.key_origin);
  }

  __device__ __forceinline__ void apply_window(Scores& scores, int first) const {
    const ThreadRows& rows = rows_.get(rules_, sequence_);
    const int last = first + kBlockKeys - 1;
    const bool has_begin = first < rows.begin[0] || first < rows.begin[1];
    const bool has_end = last >= rows.end[0] || last >= rows.end[1];
    if (!has_begin && !has_end) return;
    const int lane = static_cast<int>(fresh(threadIdx.x)) % 32;  // seldom needed, so not kept
    first += lane % 4 * 2;
    // Most blocks that have an edge of a window have its end alone. (With rows in registers, some
    // kernels have none left for this.)
    if (!kKeepsRows && !has_begin) {
      mask(scores, [&](int key, int row) { return key >= rows.end[row] - first; });
    } else {
      mask(scores, [&](int key, int row) {
        return first + key < rows.begin[row] || first + key >= rows.end[row];
      });
    }
  }
  /// Hides what is_hidden(key, row) says: row 0 or 1, and keys from the thread's first on.
  template <class Test>
  __device__ __forceinline__ static void mask(Scores& scores, const Test& is_hidden) {
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (is_hidden(n * 8 + e % 2, e / 2)) scores[n][e] = -INFINITY;
      }
    }
  }

  /// Products become scale * q.k; those of a quantised cache have the scales of their keys, too.
  __device__ __forceinline__ void apply_scales(Scores& scores, const float* key_scales) const {
    if (is_scaled()) {
#pragma unroll
      for (int n = 0; n < kKeyGroups; ++n) {
        const float2 of_keys = scales_of(key_scales, n);
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[n][e] *= e % 2 == 0 ? of_keys.x : of_keys.y;
      }
    }
    const float scale = static_cast<float>(rules_.scale);
#pragma unroll
    for (int i = 0; i < kScoresPerThread; ++i) scores[i / 4][i % 4] *= scale;
  }
  __device__ __forceinline__ void apply_value_scales(Scores& weights,
                                                     const float* value_scales) const {
#pragma unroll
    for (int n = 0; n < kKeyGroups; ++n) {
      const float2 of_keys = scales_of(value_scales, n);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scale = e % 2 == 0 ? of_keys.x : of_keys.y;
        weights[n][e] = is_masked(n * 4 + e) ? 0.0F : weights[n][e] * scale;
      }
    }
  }
  /// Of the thread's two keys in group n.
  __device__ __forceinline__ float2 scales_of(const float* scales, int n) const {
    return *reinterpret_cast<const float2*>(scales + n * 8 + lane_ % 4 * 2);
  }

  const ForwardParams<float>& params_;
  const ScoreRules& rules_;
  const Sequence& sequence_;
  const int lane_;
  const RowsOfThread<kKeepsRows> rows_;
  unsigned masked_ = 0;
};

}  // namespace ladon::cuda
