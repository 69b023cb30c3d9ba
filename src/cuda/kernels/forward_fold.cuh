// Folds the segments of a row that were computed apart (softmax_state.cuh), in ascending order.
//
// A warp has a row, and its lanes have columns. How a segment is folded in depends on the maxima up
// to it alone, so each lane works that out for one of 32 segments; what is left in order is a
// multiplication and a multiply-add for each segment and column.
//
// Decoding: the block of threads that finishes a tile's last segment folds them all, which saves a
// launch and hides behind the other tiles. Which block that is changes no bit.
#pragma once

#include <cstdint>

#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda {

/// Segments with keys that some query of a range sees, counted as Partials count them.
struct SegmentRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  __device__ SegmentRange(const ScoreRules& rules, const Sequence& sequence,
                          std::int64_t first_token, std::int64_t last_token) {
    const BlockRange blocks = visible_blocks(rules, sequence, first_token, last_token);
    if (blocks.begin == blocks.end) return;
    const std::int64_t first = sequence.key_origin / kSegmentKeys;
    begin = blocks.begin / kSegmentBlocks - first;
    end = (blocks.end + kSegmentBlocks - 1) / kSegmentBlocks - first;
  }
};

/// Columns of a lane: those of a tile of values.
inline constexpr int kFoldColumns = 4;
/// Segments that a lane reads before it folds them: one by one, each would wait for memory.
inline constexpr int kFoldedAtOnce = 8;

/// Partial results are written by other blocks, so they are read past L1.
template <class Compute>
__device__ inline Compute load_partial(const Compute* from) {
  return __ldcg(from);
}

/// What a segment is to those before it, for each of 32 segments by one lane. `state` is this
/// lane's, empty where there is none; `total` has the maximum of the segments before all of them.
template <class Compute, class Exp>
__device__ inline Fold<Compute> fold_of_lane(const RowState<Compute>& total,
                                             const RowState<Compute>& state, Exp exp_of,
                                             int lane) {
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

/// Folds and stores columns [first_column, first_column + 128) of one row of a KV head, by one warp;
/// with the first columns its lse. `unit` is what a weight of 1 is in the sums.
template <class Compute, class Exp>
__device__ inline void fold_columns(const ForwardParams<Compute>& params, const Sequence& sequence,
                                    std::int64_t place, std::int64_t row,
                                    std::int64_t first_column, Exp exp_of, Compute unit) {
  const AttentionParams& call = params.call;
  const Partials<Compute>& partials = params.partials;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t token = row / call.group;
  const std::int64_t head = place % call.num_kv_heads * call.group + row % call.group;
  const SegmentRange segments(call.rules, sequence, token, token);
  RowState<Compute> total;
  Compute sums[kFoldColumns] = {};
  for (std::int64_t first = segments.begin; first < segments.end; first += kWarp) {
    const int count = static_cast<int>(min(segments.end - first, std::int64_t{kWarp}));
    RowState<Compute> state;
    if (lane < count) {
      const std::int64_t index = partials.index(place, first + lane, row);
      state = {load_partial(partials.maximum + index), load_partial(partials.sum + index)};
    }
    const Fold<Compute> own = fold_of_lane(total, state, exp_of, lane);
    const Compute* const columns =
        partials.out + partials.index(place, first, row) * call.value_dim + first_column + lane;
    const std::int64_t stride = partials.rows * call.value_dim;  // of segments
    for (int s = 0; s < count; s += kFoldedAtOnce) {
      Compute added[kFoldedAtOnce][kFoldColumns];
#pragma unroll
      for (int i = 0; i < kFoldedAtOnce; ++i) {
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) {
          added[i][c] = s + i < count && first_column + lane + c * kWarp < call.value_dim
                            ? load_partial(columns + (s + i) * stride + c * kWarp)
                            : Compute{0};
        }
      }
#pragma unroll
      for (int i = 0; i < kFoldedAtOnce; ++i) {
        const Fold<Compute> fold = broadcast(own, (s + i) % kWarp);
        const Compute sum = __shfl_sync(kAllLanes, state.sum, (s + i) % kWarp);
        if (s + i >= count) continue;
        total.sum = fold(total.sum, sum);
#pragma unroll
        for (int c = 0; c < kFoldColumns; ++c) sums[c] = fold(sums[c], added[i][c]);
      }
    }
    total.maximum = __shfl_sync(kAllLanes, own.state.maximum, count - 1);
  }
  const RowResult<Compute> result = finish_row(
      call.rules, head, total.maximum * static_cast<Compute>(params.natural), total.sum, unit);
  const std::int64_t start =
      sequence.out + token * call.out.token_stride + head * call.out.head_stride;
#pragma unroll
  for (int c = 0; c < kFoldColumns; ++c) {
    const std::int64_t column = first_column + lane + c * kWarp;
    if (column >= call.value_dim) continue;
    const Compute out = total.sum == 0 ? Compute{0} : sums[c] * result.weight;
    store_element(call.out.data, call.out.dtype, start + column, out + Compute{0});
  }
  if (first_column == 0 && lane == 0 && call.lse.data != nullptr) {
    store_lse(call.lse, sequence.lse + token * call.lse.token_stride + head * call.lse.head_stride,
              result.lse);
  }
}

/// Whether all other blocks have stored what they have of a tile.
template <class Compute>
__device__ inline bool arrives_last(const ForwardParams<Compute>& params, const ForwardTask& task) {
  __threadfence();  // what this thread has stored comes before the arrival
  __syncthreads();
  bool is_last = false;
  if (threadIdx.x == 0) {
    const std::int64_t tile =
        (task.sequence * params.call.num_kv_heads + task.kv_head) * params.row_tiles +
        task.row_tile;
    int& arrived = params.partials.arrivals[tile];
    is_last = atomicAdd(&arrived, 1) + 1 == params.partials.segments * params.value_chunks;
    if (is_last) arrived = 0;  // for the next call
  }
  is_last = __syncthreads_or(is_last) != 0;
  __threadfence();  // what the others have stored is read after it
  return is_last;
}

/// The end of a block of threads whose segment is stored: the last one of a tile of `tile_rows`
/// folds its segments. What it needs is computed anew, because it would take registers from the loop
/// before it.
template <class Compute, class Exp>
__device__ inline void fold_after_last(const ForwardParams<Compute>& params, int tile_rows,
                                       Exp exp_of, Compute unit) {
  const ForwardTask task(params, fresh(blockIdx.x));
  const AttentionParams& call = params.call;
  const Sequence& sequence = sequence_of(params, task.sequence);
  const std::int64_t rows = sequence.query_len * call.group;
  const std::int64_t first_row = task.row_tile * tile_rows;
  if (first_row >= rows || !arrives_last(params, task)) return;
  const std::int64_t place = task.sequence * call.num_kv_heads + task.kv_head;
  for (std::int64_t row = first_row + threadIdx.x / kWarp; row < min(rows, first_row + tile_rows);
       row += blockDim.x / kWarp) {
    for (std::int64_t column = 0; column < call.value_dim; column += kFoldColumns * kWarp) {
      fold_columns(params, sequence, place, row, column, exp_of, unit);
    }
  }
}

}  // namespace ladon::cuda
