// What the backward pass does once for each row and key, before its products.
//
// row_statistics: delta = rowsum(dout * out) - dlse, a block for each 64 rows of a head; 8 to 32
// lanes share two rows at a time, as many as have work with one load each. It also finds
// the rows and tiles that tensor cores need to know about, as look_at_keys does for k and v. Reads
// out and dout, and q where lse does not show that it is not finite (k and v) once: the limit is
// memory.
//
// zero_padding: a thread for each element of dk and dv that is padding.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/kernels/backward.cuh"

namespace ladon::cuda::backward {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kRowsPerWarp = kTile / kWarps;

template <class Compute>
__device__ Compute load_lse(const LseOperand& lse, std::int64_t offset, std::int64_t token,
                            std::int64_t head) {
  return load_element<Compute>(lse.data, lse.is_f64 ? DType::kF64 : DType::kF32,
                               offset + token * lse.token_stride + head * lse.head_stride);
}

// A lane has 8 neighbouring elements of 2 rows at once, so that enough loads are under way. 4 were
// no faster, because they leave registers for two blocks only.
constexpr int kChunk = 8;
constexpr int kBatch = 2;

/// Elements [first, first + 8) of some rows.
template <class Storage>
struct Chunks {
  Storage elements[kBatch][kChunk];

  /// Whether they can be loaded: all exist, and words are aligned.
  __device__ static bool is_aligned(const Storage* const (&rows)[kBatch], std::int64_t first,
                                    std::int64_t dim) {
    bool all = first + kChunk <= dim;
    for (const Storage* row : rows) {
      all = all && reinterpret_cast<std::uintptr_t>(row + first) % sizeof(uint4) == 0;
    }
    return all;
  }
  __device__ void load(const Storage* const (&rows)[kBatch], std::int64_t first) {
    constexpr int kWords = sizeof elements[0] / sizeof(uint4);
    uint4 words[kBatch][kWords];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        words[r][i] = reinterpret_cast<const uint4*>(rows[r] + first)[i];
      }
    }
    memcpy(elements, words, sizeof elements);
  }
  __device__ bool is_finite(int row) const {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) all = all && isfinite(to_float(elements[row][i]));
    return all;
  }
};

/// Which rows of a warp's a lane works on: kLanes lanes share kBatch neighbours at a time.
template <int kLanes>
struct LaneRows {
  static constexpr int kAtOnce = 32 / kLanes * kBatch;  // rows of the warp
  static constexpr int kStep = kLanes * kChunk;         // columns of a row
  static_assert(kRowsPerWarp % kAtOnce == 0);
  int first_row = static_cast<int>(threadIdx.x) % 32 / kLanes * kBatch;
  std::int64_t first_column = static_cast<int>(threadIdx.x) % kLanes * kChunk;
  bool is_first_lane = threadIdx.x % kLanes == 0;
};

/// Calls launch(number of lanes) for rows of so many 16-bit elements.
template <class Launch>
void with_lanes(std::int64_t dim, const Launch& launch) {
  if (dim <= 8 * kChunk) return launch(std::integral_constant<int, 8>{});
  if (dim <= 16 * kChunk) return launch(std::integral_constant<int, 16>{});
  launch(std::integral_constant<int, 32>{});
}

/// Some rows of an operand from a token on; the last that exists, again, for those past the end.
template <class Storage>
struct Rows {
  const Storage* first[kBatch];

  __device__ Rows(const Operand& operand, std::int64_t offset, std::int64_t token,
                  std::int64_t length, std::int64_t head) {
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const std::int64_t existing = token + r < length ? token + r : length - 1;
      first[r] = static_cast<const Storage*>(operand.data) + offset +
                 existing * operand.token_stride + head * operand.head_stride;
    }
  }
};

/// Clears the bits of rows of which this lane has an element that is not finite.
template <int kLanes, class Storage>
__device__ unsigned finite_rows(const Rows<Storage>& rows, std::int64_t dim, unsigned finite) {
  using Lane = LaneRows<kLanes>;
  for (std::int64_t i = Lane().first_column; i < dim; i += Lane::kStep) {
    using OfRows = Chunks<Storage>;
    if (OfRows::is_aligned(rows.first, i, dim)) {
      OfRows chunks;
      chunks.load(rows.first, i);
#pragma unroll
      for (int r = 0; r < kBatch; ++r) finite &= ~(chunks.is_finite(r) ? 0U : 1U << r);
      continue;
    }
    const int left = static_cast<int>(min(dim - i, std::int64_t{kChunk}));
#pragma unroll 1
    for (int e = 0; e < left; ++e) {
#pragma unroll
      for (int r = 0; r < kBatch; ++r) {
        finite &= ~(isfinite(to_float(rows.first[r][i + e])) ? 0U : 1U << r);
      }
    }
  }
  return finite;
}

template <class Storage, int kLanes>
__global__ void __launch_bounds__(kThreads)
    row_statistics(const __grid_constant__ BackwardParams params) {
  using Compute = std::conditional_t<sizeof(Storage) == 8, double, float>;
  __shared__ std::uint8_t live_of_warp[kWarps];
  const AttentionParams& call = params.call;
  const std::int64_t block = params.first_block + blockIdx.x;
  // Heads first: those of a token are neighbours in memory.
  const std::int64_t head = block % call.num_heads;
  const std::int64_t tile = block / call.num_heads;
  const std::int64_t index = sequence_of(params.row_tile_starts, call.num_sequences, tile);
  const Sequence& sequence = call.sequences[index];
  auto* const stats = static_cast<RowStats<Compute>*>(params.stats) + head * params.num_rows +
                      params.row_starts[index];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const LaneRows<kLanes> lane;
  const std::int64_t first = (tile - params.row_tile_starts[index]) * kTile + warp * kRowsPerWarp;
  unsigned live = 0;
  bool is_finite = true;
  for (int step = 0; step < kRowsPerWarp && first + step < sequence.query_len;
       step += lane.kAtOnce) {
    const int i = step + lane.first_row;
    const auto rows_of = [&](const Operand& operand, std::int64_t offset) {
      return Rows<Storage>(operand, offset, first + i, sequence.query_len, head);
    };
    const Rows<Storage> out = rows_of(call.out, sequence.out);
    const Rows<Storage> dout = rows_of(call.dout, sequence.dout);
    Compute delta[kBatch] = {};
    Compute lse[kBatch];
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      const std::int64_t token = min(first + i + r, sequence.query_len - 1);
      lse[r] = load_lse<Compute>(call.lse, sequence.lse, token, head);
    }
    unsigned finite = (1U << kBatch) - 1;
    const std::int64_t dim = call.value_dim;
    for (std::int64_t column = lane.first_column; column < dim; column += lane.kStep) {
      using OfRows = Chunks<Storage>;
      const auto add = [&](int r, Storage of_out, Storage of_dout) {
        const auto dout_element = widened<Compute>(of_dout);
        delta[r] = fma(widened<Compute>(of_out), dout_element, delta[r]);
        finite &= ~(isfinite(dout_element) ? 0U : 1U << r);
      };
      if (OfRows::is_aligned(out.first, column, dim) &&
          OfRows::is_aligned(dout.first, column, dim)) {
        OfRows of_out;
        OfRows of_dout;
        of_out.load(out.first, column);
        of_dout.load(dout.first, column);
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
#pragma unroll
          for (int e = 0; e < kChunk; ++e) add(r, of_out.elements[r][e], of_dout.elements[r][e]);
        }
      } else {
#pragma unroll
        for (int r = 0; r < kBatch; ++r) {
#pragma unroll 1
          for (std::int64_t e = column; e < min(column + kChunk, dim); ++e) {
            add(r, out.first[r][e], dout.first[r][e]);
          }
        }
      }
    }
    if (params.live_rows != nullptr && !params.lse_shows_q) {
      finite = finite_rows<kLanes>(rows_of(call.q, sequence.q), call.head_dim, finite);
    }
#pragma unroll
    for (int r = 0; r < kBatch; ++r) {
      for (int distance = kLanes / 2; distance > 0; distance /= 2) {
        delta[r] += __shfl_xor_sync(0xffffffffU, delta[r], distance);
      }
      const std::int64_t token = first + i + r;
      if (token >= sequence.query_len) continue;
      if (lse[r] == -static_cast<Compute>(INFINITY)) {
        if (lane.is_first_lane) stats[token] = {static_cast<Compute>(INFINITY), 0};
        continue;
      }
      live |= 1U << (i + r);
      if (call.dlse.data != nullptr) {
        delta[r] -= load_lse<Compute>(call.dlse, sequence.dlse, token, head);
      }
      is_finite = is_finite && (finite >> r & 1) != 0;
      if (params.lse_shows_q) is_finite = is_finite && isfinite(lse[r]) && isfinite(delta[r]);
      if (lane.is_first_lane) stats[token] = {lse[r], delta[r]};
    }
  }
  if (params.live_rows == nullptr) return;
  live = __reduce_or_sync(0xffffffffU, live);
  if (threadIdx.x % 32 == 0) live_of_warp[warp] = static_cast<std::uint8_t>(live);
  const bool all_finite = __syncthreads_and(is_finite) != 0;
  if (threadIdx.x != 0) return;
  std::uint64_t live_rows = 0;
  for (int i = 0; i < kWarps; ++i) {
    live_rows |= static_cast<std::uint64_t>(live_of_warp[i]) << (i * kRowsPerWarp);
  }
  const std::int64_t place = head * params.num_row_tiles + tile;
  params.live_rows[place] = live_rows;
  params.rows_not_finite[place] = all_finite ? 0 : 1;
  if (!all_finite) atomicOr(params.any_not_finite, 1U);
}

// Left alone, ptxas spills a register on sm_80 for one more block than fits otherwise.
template <class Storage, int kLanes>
__global__ void __launch_bounds__(kThreads, 4)
    look_at_keys(const __grid_constant__ BackwardParams params) {
  const AttentionParams& call = params.call;
  const std::int64_t block = params.first_block + blockIdx.x;
  const std::int64_t head = block % call.num_kv_heads;
  const std::int64_t tile = block / call.num_kv_heads;
  const std::int64_t index = sequence_of(params.key_tile_starts, call.num_sequences, tile);
  const Sequence& sequence = call.sequences[index];
  const std::int64_t first =
      (tile - params.key_tile_starts[index]) * kTile + threadIdx.x / 32 * kRowsPerWarp;
  unsigned finite = (1U << kBatch) - 1;
  const LaneRows<kLanes> lane;
  for (int i = 0; i < kRowsPerWarp && first + i < sequence.kv_len; i += lane.kAtOnce) {
    const auto rows_of = [&](const Operand& operand, std::int64_t offset) {
      return Rows<Storage>(operand, offset, first + i + lane.first_row, sequence.kv_len, head);
    };
    finite = finite_rows<kLanes>(rows_of(call.k, sequence.k), call.head_dim, finite);
    finite = finite_rows<kLanes>(rows_of(call.v, sequence.v), call.value_dim, finite);
  }
  const bool is_finite = finite == (1U << kBatch) - 1;
  const bool all_finite = __syncthreads_and(is_finite) != 0;
  if (threadIdx.x != 0) return;
  params.keys_not_finite[head * params.num_key_tiles + tile] = all_finite ? 0 : 1;
  if (!all_finite) atomicOr(params.any_not_finite, 1U);
}

/// Zeros in one of dk and dv for the keys from kv_len to the end of a padded batch.
struct PaddingParams {
  const Sequence* sequences;
  std::int64_t num_sequences, most_padding, padded_kv_len, num_heads, dim;
  Operand result;
  bool of_keys;
};

__global__ void __launch_bounds__(kThreads)
    zero_padding_rows(const __grid_constant__ PaddingParams params) {
  const std::int64_t row_elements = params.num_heads * params.dim;
  const std::int64_t count = params.num_sequences * params.most_padding * row_elements;
  const std::int64_t step = static_cast<std::int64_t>(gridDim.x) * kThreads;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < count;
       i += step) {
    const std::int64_t row = i / row_elements;
    const Sequence& sequence = params.sequences[row / params.most_padding];
    const std::int64_t key = sequence.kv_len + row % params.most_padding;
    if (key >= params.padded_kv_len) continue;
    const std::int64_t offset = params.of_keys ? sequence.dk : sequence.dv;
    store_element(params.result.data, params.result.dtype,
                  offset + key * params.result.token_stride +
                      i % row_elements / params.dim * params.result.head_stride + i % params.dim,
                  0.0F);
  }
}

}  // namespace

void zero_padding(Queue& queue, const BackwardParams& params, std::int64_t most_padding) {
  const AttentionParams& call = params.call;
  const auto zero = [&](const Operand& result, std::int64_t dim, bool of_keys) {
    if (result.data == nullptr) return;
    const std::int64_t count = call.num_sequences * most_padding * call.num_kv_heads * dim;
    const std::int64_t blocks = std::min<std::int64_t>(
        (count + kThreads - 1) / kThreads, std::int64_t{16} * queue.num_multiprocessors());
    queue.launch(zero_padding_rows, Grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
                 PaddingParams{call.sequences, call.num_sequences, most_padding, call.padded_kv_len,
                               call.num_kv_heads, dim, result, of_keys});
  };
  zero(call.dk, call.head_dim, true);
  zero(call.dv, call.value_dim, false);
}

void prepare_rows(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  const std::int64_t blocks = params.num_row_tiles * call.num_heads;
  const std::int64_t dim =
      params.lse_shows_q ? call.value_dim : std::max(call.head_dim, call.value_dim);
  with_storage_type(call.q.dtype, [&](auto type) {
    using Storage = decltype(type);
    if constexpr (sizeof(Storage) > 2) {
      launch_blocks(queue, row_statistics<Storage, 32>, blocks, kThreads, 0, params);
    } else {
      with_lanes(dim, [&](auto lanes) {
        launch_blocks(queue, row_statistics<Storage, lanes>, blocks, kThreads, 0, params);
      });
    }
  });
}

void prepare_keys(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  const std::int64_t blocks = params.num_key_tiles * call.num_kv_heads;
  const auto launch = [&](auto type) {
    with_lanes(std::max(call.head_dim, call.value_dim), [&](auto lanes) {
      launch_blocks(queue, look_at_keys<decltype(type), lanes>, blocks, kThreads, 0, params);
    });
  };
  call.q.dtype == DType::kF16 ? launch(__half{}) : launch(__nv_bfloat16{});
}

}  // namespace ladon::cuda::backward
