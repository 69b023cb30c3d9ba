// Weighted sums of the tensor-core forward kernels: O += P V for a warp's 16 query rows and up to
// 128 columns of V, in the registers of its threads. sums[n][e] is of row e / 2 of the thread's two
// (see forward_scores.cuh) and column 8 n + 2 (lane % 4) + e % 2.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tensor_core.cuh"
#include "cuda/kernels/tile_stream.cuh"

namespace ladon::cuda {

inline constexpr int kValueGroups = kTileColumns / 8;

/// kGroups of 8 columns.
template <class Half, int kGroups = kValueGroups>
class ForwardSums {
 public:
  using Sums = float[kGroups][4];
  using Weights = float[kKeyGroups][4];

  /// A tile has `columns` of V. These sums are of the groups from first_group on.
  __device__ __forceinline__ explicit ForwardSums(int columns, int first_group = 0)
      : columns_(max(0, min(kGroups * 8, columns - first_group * 8))),
        first_group_(first_group),
        lane_(static_cast<int>(threadIdx.x) % 32) {}

  __device__ __forceinline__ Sums& accumulators() { return sums_; }

  __device__ __forceinline__ void clear() {
    for_each([](float& sum, int, int) { sum = 0; });
  }

  __device__ __forceinline__ void rescale(float2 factors) {
    if (!__any_sync(0xffffffffU, factors.x != 1 || factors.y != 1)) return;
    for_each([&](float& sum, int, int e) { sum *= e < 2 ? factors.x : factors.y; });
  }

  __device__ __forceinline__ bool are_finite() {
    bool all = true;
    for_each([&](float& sum, int, int) { all = all && fabsf(sum) <= FLT_MAX; });
    return all;
  }

  /// Row i of the thread's two alone.
  __device__ __forceinline__ bool is_finite(int i) const {
    bool all = true;
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      all = all && fabsf(sums_[n][i * 2]) <= FLT_MAX && fabsf(sums_[n][i * 2 + 1]) <= FLT_MAX;
    }
    return all;
  }

  /// Adds the products of weights with a tile of V.
  __device__ __forceinline__ void add(const Weights& weights, const unsigned char* tile) {
    add_products<Half, false>(weights, tile);
  }

  /// The same for a tile of quantised elements in bf16, whose scales are in the weights. Those keep
  /// 16 bits of precision, as two bf16.
  __device__ __forceinline__ void add_scaled(const Weights& weights, const unsigned char* tile) {
    add_products<__nv_bfloat16, true>(weights, tile);
  }

  /// Adds the infinities and NaN of a tile of V for those rows that see them. `masked` has a bit
  /// for each of the thread's weights.
  __device__ __forceinline__ void add_non_finite(unsigned masked, const unsigned char* tile) {
    const int column = lane_ % 4 * 2;
#pragma unroll 1
    for (int key = 0; key < kBlockKeys; ++key) {
      // The lane of the same rows that has this key's weights, and their bits.
      const int owner = lane_ / 4 * 4 + key % 8 / 2;
      const unsigned bits = __shfl_sync(0xffffffffU, masked, owner) >> (key / 8 * 4 + key % 2);
#pragma unroll
      for (int n = 0; n < kGroups; ++n) {
        const Half* pair =
            reinterpret_cast<const Half*>(tile + chunk_offset(key, first_group_ + n)) + column;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float value = static_cast<float>(pair[e % 2]);
          const bool is_seen = (bits >> (e / 2 * 2) & 1U) == 0;
          if (n * 8 < columns_ && is_seen && !(fabsf(value) <= FLT_MAX)) sums_[n][e] += value;
        }
      }
    }
  }

  /// Folds in the thread's sums of earlier segments, which nobody else reads. After the last
  /// segment the sums stay in registers. Kept is float4, or float2 where the second of the thread's
  /// rows does not exist. kAtOnce groups are read at a time: registers are needed for them.
  template <int kAtOnce = kGroups, class Kept>
  __device__ __forceinline__ void fold(const Fold<float> (&folds)[2], Kept* earlier, int stride,
                                       bool has_earlier, bool is_last) {
    // Most rows see keys of both.
    constexpr bool kOneRow = sizeof(Kept) != sizeof(float4);
    const bool takes_both =
        __all_sync(0xffffffffU, folds[0].takes_both() && (kOneRow || folds[1].takes_both()));
#pragma unroll
    for (int first = 0; first < kGroups; first += kAtOnce) {
      if (has_earlier && takes_both) {
        add_earlier<kAtOnce>(earlier, stride, first, [&](float before, float sum, int row) {
          return folds[row].both(before, sum);
        });
      } else if (has_earlier) {
        add_earlier<kAtOnce>(earlier, stride, first, [&](float before, float sum, int row) {
          return folds[row](before, sum);
        });
      }
      if (is_last) continue;
#pragma unroll
      for (int n = first; n < first + kAtOnce; ++n) {
        Kept& kept = earlier[n * stride];
        kept.x = sums_[n][0];
        kept.y = sums_[n][1];
        if constexpr (sizeof(Kept) == sizeof(float4)) {
          kept.z = sums_[n][2];
          kept.w = sums_[n][3];
        }
      }
    }
  }

  /// Row i of the thread's two, as it is.
  __device__ __forceinline__ void store_partial(int i, float* out) const {
    const int column = lane_ % 4 * 2;
    int present = columns_ - column;
    out += column;
#pragma unroll
    for (int n = 0; n < kGroups; ++n, out += 8, present -= 8) {
      if (present >= 1) out[0] = sums_[n][i * 2];
      if (present >= 2) out[1] = sums_[n][i * 2 + 1];
    }
  }

  /// Row i times `factor`; 0 where it saw no key, even where the sums are not. All lanes call it;
  /// where the row does not exist, nothing is written.
  __device__ __forceinline__ void store(int i, bool exists, float factor, bool is_seen, Half* out,
                                        bool aligned) const {
    // The row's four lanes exchange pairs, so that lane t has the eight columns of groups 4 m + t.
#pragma unroll
    for (int first = 0; first < kGroups; first += 4) {
      unsigned pairs[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float(&sums)[4] = sums_[first + n];
        pairs[n] = pack<Half>(is_seen ? result_of(sums[i * 2], factor) : 0.0F,
                              is_seen ? result_of(sums[i * 2 + 1], factor) : 0.0F);
      }
      exchange<1>(pairs[0], pairs[1]);
      exchange<1>(pairs[2], pairs[3]);
      exchange<2>(pairs[0], pairs[2]);
      exchange<2>(pairs[1], pairs[3]);
      const int column = (first + lane_ % 4) * 8;
      const int present = exists ? columns_ - column : 0;
      if (present >= 8 && aligned) {
        *reinterpret_cast<uint4*>(out + column) =
            make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
      } else {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (e < present) out[column + e] = reinterpret_cast<const Half*>(&pairs[e / 2])[e % 2];
        }
      }
    }
  }

 private:
  /// Of lanes that differ in bit kLane, the lower gives `high` for the other's `low`.
  template <int kLane>
  __device__ __forceinline__ void exchange(unsigned& low, unsigned& high) const {
    const bool is_upper = (lane_ & kLane) != 0;
    const unsigned other = __shfl_xor_sync(0xffffffffU, is_upper ? low : high, kLane);
    (is_upper ? low : high) = other;
  }

  template <int kCount, class Kept, class Add>
  __device__ __forceinline__ void add_earlier(const Kept* earlier, int stride, int first,
                                              const Add& add) {
    // What is read later is not read ahead.
    if constexpr (kCount < kGroups) asm volatile("" ::: "memory");
#pragma unroll
    for (int n = first; n < first + kCount; ++n) {
      const Kept before = earlier[n * stride];
      sums_[n][0] = add(before.x, sums_[n][0], 0);
      sums_[n][1] = add(before.y, sums_[n][1], 0);
      if constexpr (sizeof(Kept) == sizeof(float4)) {
        sums_[n][2] = add(before.z, sums_[n][2], 1);
        sums_[n][3] = add(before.w, sums_[n][3], 1);
      }
    }
  }

  template <class Visit>
  __device__ __forceinline__ void for_each(const Visit& visit) {
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) visit(sums_[n][e], n, e);
    }
  }

  /// Half the columns or all of them.
  template <class Element, bool kTwice>
  __device__ __forceinline__ void add_products(const Weights& weights, const unsigned char* tile) {
    if (columns_ > kGroups * 8 / 2) {
      add_products<Element, kTwice, kGroups>(weights, shared_address(tile));
    } else if (columns_ > 0) {
      add_products<Element, kTwice, kGroups / 2>(weights, shared_address(tile));
    }
  }
  /// kTwice: what rounding takes from the weights is multiplied too.
  template <class Element, bool kTwice, int kUsed>
  __device__ __forceinline__ void add_products(const Weights& weights, unsigned values) {
    const unsigned offset = fresh(chunk_offset(lane_ % 16, first_group_ + lane_ / 16));
#pragma unroll
    for (int step = 0; step < kBlockKeys / 16; ++step) {
      unsigned rounded[4];
      unsigned rests[4];
      rounded_weights<Element>(weights, step, rounded);
      if constexpr (kTwice) rounding_rests<Element>(weights, step, rests);
#pragma unroll
      for (int pair = 0; pair < kUsed / 2; ++pair) {
        unsigned value[4];
        load_matrices_transposed(value,
                                 values + step * 16 * kTileRowBytes + (offset ^ (pair << 5)));
        multiply_add<Element>(sums_[pair * 2], rounded, value[0], value[1]);
        multiply_add<Element>(sums_[pair * 2 + 1], rounded, value[2], value[3]);
        if constexpr (kTwice) {
          multiply_add<Element>(sums_[pair * 2], rests, value[0], value[1]);
          multiply_add<Element>(sums_[pair * 2 + 1], rests, value[2], value[3]);
        }
      }
    }
  }
  /// What rounded_weights() loses of the weights.
  template <class Element>
  __device__ __forceinline__ static void rounding_rests(const Weights& weights, int step,
                                                        unsigned (&rests)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float(&group)[4] = weights[step * 2 + i / 2];
      rests[i] =
          pack<Element>(rest<Element>(group[i % 2 * 2]), rest<Element>(group[i % 2 * 2 + 1]));
    }
  }
  template <class Element>
  __device__ __forceinline__ static float rest(float weight) {
    return weight - static_cast<float>(Element(weight));
  }

  const int columns_;
  const int first_group_;
  const int lane_;
  Sums sums_;
};

/// One of a thread's two rows.
struct ThreadRow {
  int i;
  QueryRow query;
  bool exists;
};

/// Writes a row and its lse, if it exists. The sums begin at column `first_value`. All lanes call
/// it.
template <class Half, int kGroups>
__device__ __forceinline__ void store_row(const ForwardParams<float>& params,
                                          const Sequence& sequence, const ThreadRow& row,
                                          const RowState<float>& total,
                                          const ForwardSums<Half, kGroups>& sums, int first_value) {
  const auto& [i, query, exists] = row;
  const AttentionParams& call = params.call;
  const RowResult<float> result = finish_row(call.rules, query.head, total.maximum * params.natural,
                                             total.sum, exp2f(kWeightShift<Half>));
  if (exists && call.lse.data != nullptr && threadIdx.x % 4 == 0 && first_value == 0) {
    store_lse(
        call.lse,
        sequence.lse + query.token * call.lse.token_stride + query.head * call.lse.head_stride,
        result.lse);
  }
  const std::int64_t start = sequence.out + query.token * call.out.token_stride +
                             query.head * call.out.head_stride + first_value;
  sums.store(i, exists, result.weight * params.kept_factor, total.sum != 0,
             static_cast<Half*>(call.out.data) + start, params.aligned_out);
}

/// Sets the infinities and NaN of a tile to 0, by the first kThreads of a block.
template <class Half, int kThreads>
__device__ __forceinline__ void clear_non_finite(unsigned char* tile) {
  constexpr unsigned kExponent = std::is_same_v<Half, __nv_bfloat16> ? 0x7f80U : 0x7c00U;
  auto* const elements = reinterpret_cast<unsigned short*>(tile);
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kBlockKeys * kTileColumns; i += kThreads) {
    if ((elements[i] & kExponent) == kExponent) elements[i] = 0;
  }
}

}  // namespace ladon::cuda
