// Scores and sums of the backward pass in the registers of a warp: S and dP become P and dS, and
// those are multiplied into the sums of a result.
//
// A warp has 16 own rows, which are M of every product, and takes 32 other rows at a time, as 4
// accumulators n of 8 columns. backward_tiles.cuh says which elements a thread has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/backward.cuh"
#include "cuda/kernels/backward_careful.cuh"
#include "cuda/kernels/backward_tiles.cuh"

namespace ladon::cuda::backward {

/// The window of some rows and keys: key i is visible to row j where low <= i - j <= high and
/// i < keys.
struct Band {
  int low;
  int high;
  int keys;

  Band() = default;
  /// For rows and keys from these on. Limits further than `far` are that.
  __device__ Band(const ScoreRules& rules, const Sequence& sequence, std::int64_t first_token,
                  std::int64_t first_key, std::int64_t far = kTile) {
    const auto clamped = [far](std::int64_t x) {
      return static_cast<int>(x < -far ? -far : x > far ? far : x);
    };
    const std::int64_t distance = first_key - first_token - sequence.position_offset;
    low = clamped(-rules.window_left - distance);
    high = clamped(rules.window_right - distance);
    keys = clamped(sequence.kv_len - first_key);
  }
  /// Whether so many rows see so many keys.
  __device__ bool sees_all(int num_tokens, int num_keys) const {
    return low <= 1 - num_tokens && high >= num_keys - 1 && keys >= num_keys;
  }
  __device__ bool sees(int key, int row) const {
    return key - row >= low && key - row <= high && key < keys;
  }
};

/// The own row and the other row of element i of accumulator n of this thread, within their tiles.
/// Every 128 threads of a block have a tile.
struct FragmentPlace {
  int first_own = static_cast<int>(threadIdx.x) % kMmaThreads / 32 * 16 +
                  static_cast<int>(threadIdx.x) % 32 / 4;
  int first_other = static_cast<int>(threadIdx.x) % 4 * 2;
  __device__ int own(int i) const { return first_own + i / 2 * 8; }
  __device__ int other(int n, int i) const { return first_other + n * 8 + i % 2; }
};

/// P of one score where there are no rules but the scale.
__device__ inline float plain_weight(float score, float scale, float lse) {
  constexpr float kLog2e = 1.44269504F;
  // lse comes off before the factor log2(e), so that large scores do not overflow.
  return exp2_approximate(held_exponent(fmaf(score, scale, -lse) * kLog2e));
}

/// S to P and dP to dS, in place, where there are no rules but the scale.
template <bool kOwnKeys>
__device__ inline void plain_gradients(float scale, const RowStats<float>* stats,
                                       ScoreFragment& scores, ScoreFragment& dscores) {
  const FragmentPlace place;
#pragma unroll
  for (int n = 0; n < kScoreRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const RowStats<float> row = stats[kOwnKeys ? place.other(n, i) : place.own(i)];
      scores[n][i] = plain_weight(scores[n][i], scale, row.lse);
      dscores[n][i] = scores[n][i] * (dscores[n][i] - row.delta);
    }
  }
}

/// Sets P and dS to 0 outside of the window.
template <bool kOwnKeys, int kGroups>
__device__ inline void apply_window(const Band& band, float (&weights)[kGroups][4],
                                    float (&gradients)[kGroups][4]) {
  // The differences of keys and rows are not kept in registers from one tile to the next.
  FragmentPlace place;
  place.first_own = static_cast<int>(cuda::fresh(static_cast<std::uint32_t>(place.first_own)));
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int own = place.own(i);
      const int other = place.other(n, i);
      if (band.sees(kOwnKeys ? own : other, kOwnKeys ? other : own)) continue;
      weights[n][i] = 0;
      gradients[n][i] = 0;
    }
  }
}

/// Finds the visible scores where there are no rules but the scale. S and dP of rows that see no
/// key or do not exist become those of a row of zeros, whatever the key holds.
template <bool kOwnKeys>
__device__ inline VisibleScores find_visible(float scale, const Band& band, std::int64_t num_rows,
                                             const RowStats<float>* stats, ScoreFragment& scores,
                                             ScoreFragment& dscores) {
  const FragmentPlace place;
  VisibleScores visible = 0;
#pragma unroll
  for (int n = 0; n < kScoreRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = kOwnKeys ? place.other(n, i) : place.own(i);
      const int key = kOwnKeys ? place.own(i) : place.other(n, i);
      const bool sees_nothing = stats[row].lse == INFINITY && stats[row].delta == 0;
      if (row >= num_rows || sees_nothing) {
        scores[n][i] = 0;
        dscores[n][i] = 0;
      } else if (band.sees(key, row) && scores[n][i] * scale != -INFINITY) {
        visible |= 1U << (4 * n + i);
      }
    }
  }
  return visible;
}

/// Sets P and dS of rows that exist to 0 where they are not visible.
template <bool kOwnKeys>
__device__ inline void clear_hidden(VisibleScores visible, std::int64_t num_rows,
                                    ScoreFragment& weights, ScoreFragment& gradients) {
  const FragmentPlace place;
#pragma unroll
  for (int n = 0; n < kScoreRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = kOwnKeys ? place.other(n, i) : place.own(i);
      if ((visible >> (4 * n + i) & 1) != 0 || row >= num_rows) continue;
      weights[n][i] = 0;
      gradients[n][i] = 0;
    }
  }
}

/// S and dP of a thread in shared memory, where all rules turn them into P and dS: there the rules
/// are a loop over elements and not 16 copies of it, and registers are free for them.
template <int kThreads>
class ParkedScores {
 public:
  static constexpr int kElements = kScoreRows / 2;  // of a thread
  static constexpr std::size_t kBytes = 2 * kElements * kThreads * sizeof(float);

  __device__ explicit ParkedScores(unsigned char* memory)
      : scores_(reinterpret_cast<float*>(memory) + threadIdx.x),
        dscores_(scores_ + kElements * kThreads) {}

  __device__ void park_scores(const ScoreFragment& values) const { park(values, scores_); }
  __device__ void park_dscores(const ScoreFragment& values) const { park(values, dscores_); }
  __device__ void load_weights(ScoreFragment& values) const { load(scores_, values); }
  __device__ void load_gradients(ScoreFragment& values) const { load(dscores_, values); }

  /// Returns which scores are visible.
  template <bool kOwnKeys>
  __device__ VisibleScores apply_rules(const ScoreRules& rules, const Sequence& sequence,
                                       std::int64_t head, std::int64_t first_token,
                                       std::int64_t first_key, const RowStats<float>* stats) const {
    const FragmentPlace place;
    VisibleScores visible = 0;
#pragma unroll 1
    for (int e = 0; e < kElements; ++e) {
      const int own = place.own(e % 4);
      const int other = place.other(e / 4, e % 4);
      const int row = kOwnKeys ? other : own;
      const std::int64_t key = first_key + (kOwnKeys ? own : other);
      float& score = scores_[e * kThreads];
      float& dscore = dscores_[e * kThreads];
      ScoreGradient<float> gradient;
      if (first_token + row < sequence.query_len) {
        gradient = score_gradient(rules, sequence, QueryRow{first_token + row, head}, key, score,
                                  dscore, stats[row]);
      }
      score = gradient.weight;
      dscore = gradient.scaled;
      visible |= (gradient.visible ? 1U : 0U) << e;
    }
    return visible;
  }

 private:
  __device__ static void park(const ScoreFragment& values, float* to) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) to[e * kThreads] = values[e / 4][e % 4];
  }
  __device__ static void load(const float* from, ScoreFragment& values) {
#pragma unroll
    for (int e = 0; e < kElements; ++e) values[e / 4][e % 4] = from[e * kThreads];
  }

  float* const scores_;
  float* const dscores_;
};

/// Sums of 16 own rows by kColumns columns, in units of a power of two for each of a thread's two
/// rows. bf16 has the exponents of f32 and needs no units: they stay 1.
template <class T, int kColumns>
struct FragmentSums {
  static constexpr bool kUnits = std::is_same_v<T, __half>;
  static constexpr float kFirstUnit = kUnits ? 0x1p100F : 1.0F;

  float sums[kColumns / 8][4] = {};
  float units[2] = {kFirstUnit, kFirstUnit};

  /// sums += values other, where values[16 x kScoreRows] are P or dS, and sums are of the columns
  /// from kFirst on.
  template <int kFirst, int kDim>
  __device__ void add(const ScoreFragment& values, std::uint32_t other_rows,
                      const LaneOffsets<kDim>& lane) {
    std::uint32_t a[kScoreRows / 16][4];
    pack(values, a);
    add_product_tile<T, kFirst>(a, other_rows, lane, sums);
  }

  /// The same, where elements of `other` that are not finite reach visible values alone.
  template <int kFirst, int kDim>
  __device__ void add_carefully(const ScoreFragment& values, VisibleScores visible,
                                std::uint32_t other_rows, const LaneOffsets<kDim>& lane) {
    std::uint32_t a[kScoreRows / 16][4];
    pack(values, a);
    add_product_tile_carefully<T, kFirst>(a, SignsOfVisible(values, visible), other_rows, lane,
                                          sums);
  }

  /// What a row's sums are multiplied with at the end; exact.
  __device__ float factor(int half) const { return kUnits ? 1 / units[half] : 1.0F; }

 private:
  /// Rounds values to an operand of products.
  __device__ void pack(const ScoreFragment& values, std::uint32_t (&a)[kScoreRows / 16][4]) {
    if constexpr (kUnits) {
      fit_unit(values, 0);
      fit_unit(values, 1);
    }
#pragma unroll
    for (int k = 0; k < kScoreRows / 16; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&from)[4] = values[2 * k + half];
        a[k][2 * half] = pack_in_units(from[0], from[1], units[0]);
        a[k][2 * half + 1] = pack_in_units(from[2], from[3], units[1]);
      }
    }
  }
  __device__ static std::uint32_t pack_in_units(float low, float high, float unit) {
    return kUnits ? cuda::pack<T>(low * unit, high * unit) : cuda::pack<T>(low, high);
  }

  /// Lowers a row's unit where its values would pass 2^14. The four lanes of a row agree.
  __device__ void fit_unit(const ScoreFragment& values, int half) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < kScoreRows / 8; ++n) {
      largest = fmaxf(largest, fmaxf(fabsf(values[n][2 * half]), fabsf(values[n][2 * half + 1])));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffU, largest, 2));
    if (largest * units[half] <= 0x1p14F) return;
    // The largest becomes 2^12 to 2^13.
    const std::uint32_t exponent = __float_as_uint(largest) >> 23;
    const float unit = __uint_as_float((127 + 12 + 127 - exponent) << 23);
    const float ratio = unit / units[half];
    units[half] = unit;
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
      sums[n][2 * half] *= ratio;
      sums[n][2 * half + 1] *= ratio;
    }
  }
};

/// Sums of all blocks of keys, each block's added in turn.
template <int kColumns>
struct FragmentTotals {
  float sums[kColumns / 8][4] = {};
  bool is_empty = true;

  /// Adds the sums of a block, and starts them again.
  template <class T>
  __device__ void take(FragmentSums<T, kColumns>& block) {
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float added = block.sums[n][i] * block.factor(i / 2);
        sums[n][i] = is_empty ? added : sums[n][i] + added;
      }
    }
    is_empty = false;
    block = {};
  }
  __device__ float factor(int /*half*/) const { return 1.0F; }
};

/// One of two that have different types.
template <bool kFirst, class First, class Second>
__device__ constexpr const auto& first_if(const First& first, const Second& second) {
  if constexpr (kFirst) {
    return first;
  } else {
    return second;
  }
}

/// Two neighbouring results, of which `count` exist.
template <class T>
__device__ inline void store_pair(const Operand& operand, std::int64_t index, float first,
                                  float second, int count) {
  if (operand.dtype == DType::kF32) {
    float* const to = static_cast<float*>(operand.data) + index;
    to[0] = first;
    if (count > 1) to[1] = second;
    return;
  }
  auto* const to = static_cast<std::uint16_t*>(operand.data) + index;
  const std::uint32_t pair = pack<T>(first, second);
  if (count > 1 && reinterpret_cast<std::uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<std::uint32_t*>(to) = pair;
    return;
  }
  to[0] = static_cast<std::uint16_t>(pair);
  if (count > 1) to[1] = static_cast<std::uint16_t>(pair >> 16);
}

/// Writes the sums of a block, times a factor, to rows of a [token, head, dim] operand: in 16 bits,
/// or before they are rounded to them.
template <class T, class Sums>
__device__ inline void store_sums(const Sums& sums, float factor, const Operand& operand,
                                  std::int64_t start, std::int64_t num_rows, int dim) {
  constexpr int kGroups = sizeof(sums.sums) / sizeof(sums.sums[0]);
  if (operand.data == nullptr) return;
  const FragmentPlace place;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.own(2 * half);
    if (row >= num_rows) continue;
    const std::int64_t to = start + row * operand.token_stride;
    const float row_factor = sums.factor(half);
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const int column = place.other(n, 0);
      if (column >= dim) continue;
      const float(&from)[4] = sums.sums[n];
      store_pair<T>(operand, to + column, from[2 * half] * row_factor * factor,
                    from[2 * half + 1] * row_factor * factor, dim - column);
    }
  }
}

}  // namespace ladon::cuda::backward
