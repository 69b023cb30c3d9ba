// Finished rows of Hopper's forward kernel: rounded when their sums are done, and stored later,
// alongside the first products of the next tile.
#pragma once

#include <cfloat>
#include <cstdint>

#include "cuda/hopper/forward_tile.cuh"
#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_scores.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// A thread's columns of one row: of each group of 8 the pair 2 (lane % 4).
template <class Half, int kGroups>
struct FinishedRow {
  unsigned pairs[kGroups];
  float lse;
  bool is_finite;

  /// Row i of the thread's two, from the sums of its weighted values.
  __device__ __forceinline__ void set(const ForwardParams<float>& params, std::int64_t head, int i,
                                      const RowState<float>& total,
                                      const float (&sums)[kGroups][4]) {
    const RowResult<float> result =
        finish_row(params.call.rules, head, total.maximum * params.natural, total.sum,
                   exp2f(kWeightShift<Half>));
    lse = result.lse;
    const float weight = result.weight * params.kept_factor;
    // 0 where the row saw no key, even where the sums are not.
    const bool is_seen = total.sum != 0;
    float zeros[2] = {};  // NaN where a sum is infinite or NaN
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const float first = sums[n][i * 2];
      const float second = sums[n][i * 2 + 1];
      zeros[0] = fmaf(first, 0.0F, zeros[0]);
      zeros[1] = fmaf(second, 0.0F, zeros[1]);
      // -0 becomes 0.
      pairs[n] = pack<Half>(is_seen ? first * weight + 0.0F : 0.0F,
                            is_seen ? second * weight + 0.0F : 0.0F);
    }
    is_finite = !is_seen || zeros[0] + zeros[1] == 0;
  }

  /// Writes `columns` of the row, if it exists; where rows are aligned, by 16 bytes. All lanes call
  /// it. Each eight columns are compared for themselves: whether a number that was limited to a
  /// range is at its end (max(0, min(128, n)) == 128), ptxas 13.0 answers wrongly.
  __device__ __forceinline__ void store(Half* out, int columns, bool exists, bool aligned) {
    const unsigned lane = fresh(threadIdx.x);
    const unsigned odd = (lane & 1U) != 0 ? kFirst : kSecond;
    const unsigned upper = (lane & 2U) != 0 ? kFirst : kSecond;
    // The row's four lanes exchange pairs, so that lane t has the eight columns of groups 4 m + t.
#pragma unroll
    for (int first = 0; first < kGroups; first += 4) {
      exchange<1>(pairs[first], pairs[first + 1], odd);
      exchange<1>(pairs[first + 2], pairs[first + 3], odd);
      exchange<2>(pairs[first], pairs[first + 2], upper);
      exchange<2>(pairs[first + 1], pairs[first + 3], upper);
    }
    if (!exists) return;
    const int place = static_cast<int>(lane % 4) * 8;
    out += place;
    columns -= place;
#pragma unroll
    for (int first = 0; first < kGroups; first += 4, out += 32, columns -= 32) {
      if (aligned && columns >= 8) {
        *reinterpret_cast<uint4*>(out) =
            make_uint4(pairs[first], pairs[first + 1], pairs[first + 2], pairs[first + 3]);
      } else {
        store_elements(out, columns, first);
      }
    }
  }

 private:
  // Selectors of __byte_perm(): the first of two words, or the second.
  static constexpr unsigned kFirst = 0x3210;
  static constexpr unsigned kSecond = 0x7654;

  /// Of lanes that differ in bit kLane, the lower gives `high` for the other's `low`: `given` is
  /// kSecond for the lower. By selectors, because the compiler would make branches of conditions,
  /// with shuffles in them.
  template <int kLane>
  __device__ __forceinline__ static void exchange(unsigned& low, unsigned& high, unsigned given) {
    const unsigned other = __shfl_xor_sync(0xffffffffU, __byte_perm(low, high, given), kLane);
    low = __byte_perm(low, other, given ^ kFirst ^ kSecond);
    high = __byte_perm(high, other, given);
  }

  /// The first `count` of eight, or all of them.
  __device__ __forceinline__ void store_elements(Half* out, int count, int first) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const unsigned bits = pairs[first + e / 2] >> (e % 2 * 16);
      if (e < count) {
        *reinterpret_cast<unsigned short*>(out + e) = static_cast<unsigned short>(bits);
      }
    }
  }
};

/// Mostly without a division.
__device__ __forceinline__ QueryRow query_of(const RowHeads& heads, int row) {
  if (heads.heads == 1) return {row, heads.first};
  return heads.query_of(row);
}

/// Marks the tile of the careful kernel that holds the row: 64 rows of a KV head.
__device__ __forceinline__ void mark_unfinished(const ForwardParams<float>& params, int sequence,
                                                const QueryRow& row) {
  const AttentionParams& call = params.call;
  const std::int64_t kv_head = row.head / call.group;
  const std::int64_t careful_row = row.token * call.group + row.head % call.group;
  const std::int64_t careful_tile =
      (sequence * call.num_kv_heads + kv_head) * params.row_tiles + careful_row / kMmaRows;
  params.unfinished[0] = 1;
  params.unfinished[1 + careful_tile] = 1;
}

/// Writes a thread's two rows of a tile, `row_of_thread` and the one 8 below, and their lse. All
/// lanes call it.
template <class Half, int kGroups>
__device__ __forceinline__ void store_rows(const ForwardParams<float>& params,
                                           const AnnouncedTile& announced, int row_of_thread,
                                           FinishedRow<Half, kGroups> (&results)[2]) {
  const AttentionParams& call = params.call;
  const ForwardTile& tile = announced.tile;
  const Sequence& sequence = announced.sequence;
  const int first_row = tile.first_token * tile.heads.heads + row_of_thread;
  const int rows = static_cast<int>(sequence.query_len) * tile.heads.heads;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + i * 8;
    const QueryRow query = query_of(tile.heads, row);
    const bool exists = row < rows;
    if (exists && call.lse.data != nullptr && fresh(threadIdx.x) % 4 == 0) {
      store_lse(
          call.lse,
          sequence.lse + query.token * call.lse.token_stride + query.head * call.lse.head_stride,
          results[i].lse);
    }
    results[i].store(static_cast<Half*>(call.out.data) + sequence.out +
                         query.token * call.out.token_stride + query.head * call.out.head_stride,
                     static_cast<int>(call.value_dim), exists, params.aligned_out);
    if (exists && !results[i].is_finite) mark_unfinished(params, tile.sequence, query);
  }
}

}  // namespace ladon::cuda::hopper
