// Products with operands that hold NaN or infinity, where 0 times them must stay 0 for what is
// masked.
//
// The elements that are not finite are taken out of the product, which is then the same as that of
// finite numbers, bit for bit, for every row that does not see them. Two more products count, for
// each sum, how many of them meet a visible value, and how many more of those are +infinity than
// -infinity: where all that meet have one sign the sum becomes that infinity, otherwise NaN.
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/backward_tiles.cuh"

namespace ladon::cuda::backward {

/// Which scores of a thread are visible: bit 4 n + i for element i of accumulator n.
using VisibleScores = std::uint32_t;

inline constexpr std::uint32_t kOneBf16 = 0x3f80;
inline constexpr std::uint32_t kSignBit = 0x8000;

/// The signs of visible values, as bits like those of VisibleScores.
struct SignsOfVisible {
  VisibleScores visible;
  std::uint32_t positive = 0;
  std::uint32_t negative = 0;

  __device__ SignsOfVisible(const ScoreFragment& values, VisibleScores visible_values)
      : visible(visible_values) {
#pragma unroll
    for (int e = 0; e < kScoreRows / 2; ++e) {
      const float value = values[e / 4][e % 4];
      positive |= (value > 0 ? 1U : 0U) << e;
      negative |= (value < 0 ? 1U : 0U) << e;
    }
    positive &= visible;
    negative &= visible;
  }

  /// Part k of the operands of the two counts: 1 where a value is visible, and its sign (0 for 0).
  __device__ void load_seen(int k, std::uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = pair_of(visible, 8 * k + 2 * i, kOneBf16);
  }
  __device__ void load_signs(int k, std::uint32_t (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int e = 8 * k + 2 * i;
      to[i] = pair_of(positive, e, kOneBf16) | pair_of(negative, e, kOneBf16 | kSignBit);
    }
  }

 private:
  /// A number or 0, by bit e, and the same by bit e + 1.
  __device__ static std::uint32_t pair_of(std::uint32_t bits, int e, std::uint32_t number) {
    return ((bits >> e & 1) != 0 ? number : 0) | ((bits >> (e + 1) & 1) != 0 ? number << 16 : 0);
  }
};

/// Two elements: without those that are not finite, 1 for each of those, and the signs of
/// infinities.
struct TakenOut {
  std::uint32_t finite = 0;
  std::uint32_t found = 0;
  std::uint32_t signs = 0;
};
template <class T>
__device__ inline TakenOut take_out(std::uint32_t pair) {
  constexpr std::uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00 : 0x7f80;
  TakenOut parts;
#pragma unroll
  for (int shift = 0; shift < 32; shift += 16) {
    const std::uint32_t bits = pair >> shift & 0xffff;
    if ((bits & kExponent) != kExponent) {
      parts.finite |= bits << shift;
      continue;
    }
    const bool is_infinite = (bits & ~kSignBit) == kExponent;
    parts.found |= kOneBf16 << shift;
    if (is_infinite) parts.signs |= (kOneBf16 | (bits & kSignBit)) << shift;
  }
  return parts;
}

/// c += A B for part k of A, with infinity and NaN where visible values of A meet them.
template <class T>
__device__ inline void multiply_add_carefully(float (&c)[4], const std::uint32_t (&a)[4],
                                              const SignsOfVisible& values, int k, std::uint32_t b0,
                                              std::uint32_t b1) {
  const TakenOut low = take_out<T>(b0);
  const TakenOut high = take_out<T>(b1);
  multiply_add<T>(c, a, low.finite, high.finite);
  if (__any_sync(0xffffffffU, (low.found | high.found) != 0) == 0) return;
  std::uint32_t of_values[4];
  float met[4] = {};
  float net[4] = {};
  values.load_seen(k, of_values);
  multiply_add<__nv_bfloat16>(met, of_values, low.found, high.found);
  values.load_signs(k, of_values);
  multiply_add<__nv_bfloat16>(net, of_values, low.signs, high.signs);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (met[i] == 0) continue;
    c[i] += fabsf(net[i]) == met[i] ? copysignf(INFINITY, net[i]) : NAN;
  }
}

/// c[16 x 8 kGroups] += A[16 x kScoreRows] B in the order of add_product_tile().
template <class T, int kFirst, int kDim, int kGroups>
__device__ inline void add_product_tile_carefully(const std::uint32_t (&a)[kScoreRows / 16][4],
                                                  const SignsOfVisible& values,
                                                  std::uint32_t b_rows,
                                                  const LaneOffsets<kDim>& lane,
                                                  float (&c)[kGroups][4]) {
#pragma unroll
  for (int k = 0; k < kScoreRows / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kGroups / 2; ++n) {
      std::uint32_t b[4];
      load_matrices_transposed(
          b, b_rows + k * 16 * TileShape<kDim>::kPitch + chunks_right(lane.down, kFirst / 16 + n));
      multiply_add_carefully<T>(c[2 * n], a[k], values, k, b[0], b[1]);
      multiply_add_carefully<T>(c[2 * n + 1], a[k], values, k, b[2], b[3]);
    }
  }
}

}  // namespace ladon::cuda::backward
