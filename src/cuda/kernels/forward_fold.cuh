// Folds the segments of a row that were computed apart (softmax_state.cuh), in ascending order.
//
// A warp has a row, and its lanes have one or four columns each. How a segment is folded in depends
// on the maxima up to it alone, so each lane works that out for one of 32 segments; what is left in
// order is a multiplication and a multiply-add for each segment and column. 32 segments are read at
// once, because one by one each would wait for memory; with four columns, eight.
//
// A kernel of its own. Where the block of threads that finished last folded its tile's segments,
// the launch was saved, but few warps had all the work at the end (H200, 8192 tokens and 8 KV
// heads: 35 us instead of 23 and 5), and every block waited for its stores to arrive (64 sequences:
// 564 us instead of 518 and 12).
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/reduce.cuh"

namespace ladon::cuda {

/// Segments with keys that some query of a range sees, counted as Partials count them.
struct SegmentRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  __device__ SegmentRange(SegmentSize size, const ScoreRules& rules, const Sequence& sequence,
                          std::int64_t first_token, std::int64_t last_token) {
    const BlockRange blocks = visible_blocks(rules, sequence, first_token, last_token);
    if (blocks.begin == blocks.end) return;
    const int first = size.of_key(sequence.key_origin);
    begin = size.of_block(blocks.begin) - first;
    end = size.of_block(blocks.end - 1) + 1 - first;
  }
};

/// What a segment is to those before it, for each of 32 segments by one lane. `state` is this
/// lane's, empty where there is none; `total` has the maximum of the segments before all of them.
template <class Compute, class Exp>
__device__ inline Fold<Compute> fold_of_lane(const RowState<Compute>& total,
                                             const RowState<Compute>& state, Exp exp_of, int lane) {
  constexpr auto kNothing = -static_cast<Compute>(INFINITY);
  const unsigned seen = __ballot_sync(kAllLanes, state.sum != 0);
  const bool has_earlier = total.sum != 0 || (seen & ((1U << lane) - 1)) != 0;
  // Maxima of all lanes up to this one.
  Compute maximum = state.sum != 0 ? state.maximum : kNothing;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const Compute lower = __shfl_up_sync(kAllLanes, maximum, step);
    if (lane >= step) maximum = fmax(maximum, lower);
  }
  Compute before = __shfl_up_sync(kAllLanes, maximum, 1);
  if (lane == 0) before = kNothing;
  if (total.sum != 0) before = fmax(before, total.maximum);
  return Fold<Compute>({before, has_earlier ? Compute{1} : Compute{0}}, state, exp_of);
}

template <class Compute>
__device__ inline Fold<Compute> broadcast(const Fold<Compute>& fold, int lane) {
  Fold<Compute> copy = fold;
  copy.earlier = __shfl_sync(kAllLanes, fold.earlier, lane);
  copy.segment = __shfl_sync(kAllLanes, fold.segment, lane);
  const int flags = __shfl_sync(kAllLanes, fold.takes_earlier + 2 * fold.takes_segment, lane);
  copy.takes_earlier = flags % 2 != 0;
  copy.takes_segment = flags / 2 != 0;
  return copy;
}

template <class Compute, class Exp>
struct FoldParams {
  ForwardParams<Compute> forward;
  Exp exp_of;
  Compute unit;             // what a weight of 1 is in the sums
  std::int64_t folded = 1;  // so many first segments are folded already: the last of them has all
};

/// Folds and stores columns first_column, first_column + 32, ... + 32 (kColumns - 1) of each lane
/// in one row of a KV head, by one warp; with the first columns its lse.
template <int kColumns, class Compute, class Exp>
__device__ inline void fold_columns(const FoldParams<Compute, Exp>& fold_params,
                                    const Sequence& sequence, unsigned place, unsigned row,
                                    std::int64_t first_column) {
  // Segments that are read at once.
  constexpr int kAtOnce = kWarp / kColumns;
  const auto& [params, exp_of, unit, folded] = fold_params;
  const AttentionParams& call = params.call;
  const Partials<Compute>& partials = params.partials;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t column = first_column + lane;
  const auto group = static_cast<unsigned>(call.group);
  const std::int64_t token = row / group;
  const std::int64_t head =
      place % static_cast<unsigned>(call.num_kv_heads) * call.group + row % group;
  SegmentRange segments(params.segment_size, call.rules, sequence, token, token);
  if (segments.begin != segments.end) {
    segments.begin = max(segments.begin, folded - 1);
    segments.end = max(segments.end, folded);
  }
  RowState<Compute> total;
  Compute sums[kColumns] = {};
  for (std::int64_t first = segments.begin; first < segments.end; first += kWarp) {
    const int count = static_cast<int>(min(segments.end - first, std::int64_t{kWarp}));
    const std::int64_t index = partials.index(place, first, row);
    const Compute* const columns = partials.out + index * call.value_dim + column;
    const std::int64_t stride = partials.rows * call.value_dim;  // of segments
    Compute added[kAtOnce][kColumns];
    const auto read = [&](int begin) {
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const bool exists = begin + s < count && column + c * kWarp < call.value_dim;
          added[s][c] = exists ? columns[(begin + s) * stride + c * kWarp] : Compute{0};
        }
      }
    };
    read(0);
    RowState<Compute> state;
    if (lane < count) {
      const std::int64_t own = index + lane * partials.rows;
      state = {partials.maximum[own], partials.sum[own]};
    }
    const Fold<Compute> fold_of_own = fold_of_lane(total, state, exp_of, lane);
#pragma unroll 1
    for (int begin = 0; begin < kWarp; begin += kAtOnce) {
      if (begin >= count) break;
      if (begin != 0) read(begin);
#pragma unroll
      for (int s = 0; s < kAtOnce; ++s) {
        // Those that do not exist change nothing. With a branch for each, every one would wait for
        // its shuffles.
        if (s % 8 == 0 && begin + s >= count) break;
        const Fold<Compute> fold = broadcast(fold_of_own, begin + s);
        total.sum = fold(total.sum, __shfl_sync(kAllLanes, state.sum, begin + s));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) sums[c] = fold(sums[c], added[s][c]);
      }
    }
    total.maximum = __shfl_sync(kAllLanes, fold_of_own.state.maximum, count - 1);
  }
  const RowResult<Compute> result = finish_row(
      call.rules, head, total.maximum * static_cast<Compute>(params.natural), total.sum, unit);
  const Compute weight = result.weight * params.kept_factor;
  const std::int64_t start =
      sequence.out + token * call.out.token_stride + head * call.out.head_stride;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (column + c * kWarp >= call.value_dim) break;
    const Compute out = total.sum == 0 ? Compute{0} : result_of(sums[c], weight);
    store_element(call.out.data, call.out.dtype, start + column + c * kWarp, out);
  }
  if (column == 0 && call.lse.data != nullptr) {
    store_lse(call.lse, sequence.lse + token * call.lse.token_stride + head * call.lse.head_stride,
              result.lse);
  }
}

}  // namespace ladon::cuda
