// Scores and sums of the backward pass in the registers of a warp: S and dP become P and dS, and
// those are multiplied into the sums of a result.
//
// A warp has 16 own rows, which are M of every product; the 64 other rows are 8 accumulators n of 8
// columns. backward_tiles.cuh says which elements a thread has.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/kernels/backward.cuh"
#include "cuda/kernels/backward_tiles.cuh"

namespace ladon::cuda::backward {

/// The window of a pair of tiles: key i is visible to row j where low <= i - j <= high and i <
/// keys.
struct Band {
  int low;
  int high;
  int keys;
  bool sees_all;

  __device__ Band(const ScoreRules& rules, const Sequence& sequence, std::int64_t token_begin,
                  std::int64_t key_begin) {
    const auto clamped = [](std::int64_t x) {
      return static_cast<int>(x < -kTile ? -kTile : x > kTile ? kTile : x);
    };
    const std::int64_t distance = key_begin - token_begin - sequence.position_offset;
    low = clamped(-rules.window_left - distance);
    high = clamped(rules.window_right - distance);
    keys = clamped(sequence.kv_len - key_begin);
    sees_all = low <= 1 - kTile && high >= kTile - 1 && keys >= kTile;
  }
  __device__ bool sees(int key, int row) const {
    return key - row >= low && key - row <= high && key < keys;
  }
};

/// The own row and the other row of element i of accumulator n of this thread, within their tiles.
struct FragmentPlace {
  int first_own = static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4;
  int first_other = static_cast<int>(threadIdx.x) % 4 * 2;
  __device__ int own(int i) const { return first_own + i / 2 * 8; }
  __device__ int other(int n, int i) const { return first_other + n * 8 + i % 2; }
};

/// S to P and dP to dS, in place, where there are no rules but the scale and the window.
template <bool kOwnKeys, bool kWindowed>
__device__ inline void plain_gradients(float scale, const Band& band, const RowStats<float>* stats,
                                       float (&scores)[8][4], float (&dscores)[8][4]) {
  constexpr float kLog2e = 1.44269504F;
  const FragmentPlace place;
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = kOwnKeys ? place.own(i) : place.other(n, i);
      const int row = kOwnKeys ? place.other(n, i) : place.own(i);
      const RowStats<float> of_row = stats[row];
      // lse comes off before the factor log2(e), so that large scores do not overflow.
      const float exponent = fmaf(scores[n][i], scale, -of_row.lse) * kLog2e;
      const float weight = exp2_approximate(exponent);
      const float gradient = weight * (dscores[n][i] - of_row.delta);
      const bool visible = !kWindowed || band.sees(key, row);
      scores[n][i] = visible ? weight : 0.0F;
      dscores[n][i] = visible ? gradient : 0.0F;
    }
  }
}

/// The same with all rules. Scores go through shared memory, each thread's own, so that the rules
/// are a loop over elements and not 32 copies of it.
template <bool kOwnKeys>
__device__ inline void ruled_gradients(const ScoreRules& rules, const Sequence& sequence,
                                       std::int64_t head, std::int64_t token_begin,
                                       std::int64_t key_begin, const RowStats<float>* stats,
                                       float* memory, float (&scores)[8][4],
                                       float (&dscores)[8][4]) {
  const FragmentPlace place;
  float* const own_scores = memory + threadIdx.x;
  float* const own_dscores = own_scores + 32 * kMmaThreads;
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    own_scores[e * kMmaThreads] = scores[e / 4][e % 4];
    own_dscores[e * kMmaThreads] = dscores[e / 4][e % 4];
  }
#pragma unroll 1
  for (int e = 0; e < 32; ++e) {
    const int own = place.own(e % 4);
    const int other = place.other(e / 4, e % 4);
    const int row = kOwnKeys ? other : own;
    const std::int64_t key = key_begin + (kOwnKeys ? own : other);
    ScoreGradient<float> gradient;
    if (token_begin + row < sequence.query_len) {
      gradient =
          score_gradient(rules, sequence, QueryRow{token_begin + row, head}, key,
                         own_scores[e * kMmaThreads], own_dscores[e * kMmaThreads], stats[row]);
    }
    own_scores[e * kMmaThreads] = gradient.weight;
    own_dscores[e * kMmaThreads] = gradient.scaled;
  }
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    scores[e / 4][e % 4] = own_scores[e * kMmaThreads];
    dscores[e / 4][e % 4] = own_dscores[e * kMmaThreads];
  }
}

/// Sums of 16 own rows by kDim columns, in units of a power of two for each of a thread's two rows.
/// bf16 has the exponents of f32 and needs no units: they stay 1.
template <class T, int kDim>
struct FragmentSums {
  static constexpr bool kUnits = std::is_same_v<T, __half>;
  static constexpr float kFirstUnit = kUnits ? 0x1p100F : 1.0F;

  float sums[kDim / 8][4] = {};
  float units[2] = {kFirstUnit, kFirstUnit};

  /// sums += values other, where values[16 x 64] are P or dS.
  __device__ void add(const float (&values)[8][4], std::uint32_t other_tile,
                      const LaneOffsets<kDim>& lane) {
    if constexpr (kUnits) {
      fit_unit(values, 0);
      fit_unit(values, 1);
    }
    std::uint32_t a[4][4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float(&from)[4] = values[2 * k + half];
        a[k][2 * half] = pack_in_units(from[0], from[1], units[0]);
        a[k][2 * half + 1] = pack_in_units(from[2], from[3], units[1]);
      }
    }
    add_product_tile<T, kDim>(a, other_tile, lane, sums);
  }

  /// What a row's sums are multiplied with at the end; exact.
  __device__ float factor(int half) const { return kUnits ? 1 / units[half] : 1.0F; }

 private:
  __device__ static std::uint32_t pack_in_units(float low, float high, float unit) {
    return kUnits ? packed<T>(low * unit, high * unit) : packed<T>(low, high);
  }

  /// Lowers a row's unit where its values would pass 2^14. The four lanes of a row agree.
  __device__ void fit_unit(const float (&values)[8][4], int half) {
    float largest = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
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
    for (int n = 0; n < kDim / 8; ++n) {
      sums[n][2 * half] *= ratio;
      sums[n][2 * half + 1] *= ratio;
    }
  }
};

/// Writes the sums of a block, times a factor, to rows of a [token, head, dim] operand.
template <class T, int kDim>
__device__ inline void store_sums(const FragmentSums<T, kDim>& sums, float factor,
                                  const Operand& operand, std::int64_t start, std::int64_t num_rows,
                                  int dim) {
  if (operand.data == nullptr) return;
  const FragmentPlace place;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.own(2 * half);
    if (row >= num_rows) continue;
    T* const to = static_cast<T*>(operand.data) + start + row * operand.token_stride;
    const bool aligned = reinterpret_cast<std::uintptr_t>(to) % 4 == 0;
    const float row_factor = sums.factor(half);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = place.other(n, 0);
      if (column >= dim) continue;
      const float(&from)[4] = sums.sums[n];
      const std::uint32_t pair =
          packed<T>(from[2 * half] * row_factor * factor, from[2 * half + 1] * row_factor * factor);
      auto* const bits = reinterpret_cast<std::uint16_t*>(to + column);
      if (aligned && column + 1 < dim) {
        *reinterpret_cast<std::uint32_t*>(bits) = pair;
        continue;
      }
      bits[0] = static_cast<std::uint16_t>(pair);
      if (column + 1 < dim) bits[1] = static_cast<std::uint16_t>(pair >> 16);
    }
  }
}

}  // namespace ladon::cuda::backward
