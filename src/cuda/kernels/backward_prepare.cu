// What the backward pass does once for each row and key, before its products.
//
// prepare_rows: delta = rowsum(dout * out) - dlse, a block for each 64 rows of a head and a warp
// for each row at a time. It also finds the rows and tiles that tensor cores need to know about, as
// prepare_keys does for k and v. Reads q, out and dout (k and v) once: the limit is memory.
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

template <class Storage>
__device__ const Storage* row_of(const Operand& operand, std::int64_t offset, std::int64_t token,
                                 std::int64_t head) {
  return static_cast<const Storage*>(operand.data) + offset + token * operand.token_stride +
         head * operand.head_stride;
}

template <class Compute>
__device__ Compute load_lse(const LseOperand& lse, std::int64_t offset, std::int64_t token,
                            std::int64_t head) {
  return load_element<Compute>(lse.data, lse.is_f64 ? DType::kF64 : DType::kF32,
                               offset + token * lse.token_stride + head * lse.head_stride);
}

/// Whether the elements that this lane has of a row are all finite.
template <class Storage>
__device__ bool is_finite_row(const Storage* row, std::int64_t dim) {
  bool is_finite = true;
  for (std::int64_t i = threadIdx.x % 32; i < dim; i += 32) {
    is_finite = is_finite && isfinite(to_float(row[i]));
  }
  return is_finite;
}

template <class Storage>
__global__ void __launch_bounds__(kThreads)
    prepare_rows(const __grid_constant__ BackwardParams params) {
  using Compute = std::conditional_t<sizeof(Storage) == 8, double, float>;
  __shared__ std::uint8_t live_of_warp[kWarps];
  const AttentionParams& call = params.call;
  const std::int64_t block = params.first_block + blockIdx.x;
  const std::int64_t head = block / params.num_row_tiles;
  const std::int64_t tile = block % params.num_row_tiles;
  const std::int64_t index = sequence_of(params.row_tile_starts, call.num_sequences, tile);
  const Sequence& sequence = call.sequences[index];
  auto* const stats = static_cast<RowStats<Compute>*>(params.stats) + head * params.num_rows +
                      params.row_starts[index];
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t lane = threadIdx.x % 32;
  const std::int64_t first = (tile - params.row_tile_starts[index]) * kTile + warp * kRowsPerWarp;
  unsigned live = 0;
  bool is_finite = true;
  for (int i = 0; i < kRowsPerWarp && first + i < sequence.query_len; ++i) {
    const std::int64_t token = first + i;
    const auto lse = load_lse<Compute>(call.lse, sequence.lse, token, head);
    if (lse == -static_cast<Compute>(INFINITY)) {
      if (lane == 0) stats[token] = {static_cast<Compute>(INFINITY), 0};
      continue;
    }
    live |= 1U << i;
    const Storage* out = row_of<Storage>(call.out, sequence.out, token, head);
    const Storage* dout = row_of<Storage>(call.dout, sequence.dout, token, head);
    Compute delta = 0;
    for (std::int64_t column = lane; column < call.value_dim; column += 32) {
      delta = fma(widened<Compute>(out[column]), widened<Compute>(dout[column]), delta);
    }
    for (int step = 16; step > 0; step /= 2) delta += __shfl_xor_sync(0xffffffffU, delta, step);
    if (call.dlse.data != nullptr) {
      delta -= load_lse<Compute>(call.dlse, sequence.dlse, token, head);
    }
    if (lane == 0) stats[token] = {lse, delta};
    if (params.live_rows == nullptr) continue;
    is_finite = is_finite && is_finite_row(dout, call.value_dim) &&
                is_finite_row(row_of<Storage>(call.q, sequence.q, token, head), call.head_dim);
  }
  if (params.live_rows == nullptr) return;
  if (lane == 0) live_of_warp[warp] = static_cast<std::uint8_t>(live);
  const bool all_finite = __syncthreads_and(is_finite) != 0;
  if (threadIdx.x != 0) return;
  std::uint64_t live_rows = 0;
  for (int i = 0; i < kWarps; ++i) {
    live_rows |= static_cast<std::uint64_t>(live_of_warp[i]) << (i * kRowsPerWarp);
  }
  params.live_rows[block] = live_rows;
  params.rows_not_finite[block] = all_finite ? 0 : 1;
  if (!all_finite) atomicOr(params.any_not_finite, 1U);
}

template <class Storage>
__global__ void __launch_bounds__(kThreads)
    prepare_keys(const __grid_constant__ BackwardParams params) {
  const AttentionParams& call = params.call;
  const std::int64_t block = params.first_block + blockIdx.x;
  const std::int64_t head = block / params.num_key_tiles;
  const std::int64_t tile = block % params.num_key_tiles;
  const std::int64_t index = sequence_of(params.key_tile_starts, call.num_sequences, tile);
  const Sequence& sequence = call.sequences[index];
  const std::int64_t first =
      (tile - params.key_tile_starts[index]) * kTile + threadIdx.x / 32 * kRowsPerWarp;
  bool is_finite = true;
  for (int i = 0; i < kRowsPerWarp && first + i < sequence.kv_len; ++i) {
    is_finite =
        is_finite &&
        is_finite_row(row_of<Storage>(call.k, sequence.k, first + i, head), call.head_dim) &&
        is_finite_row(row_of<Storage>(call.v, sequence.v, first + i, head), call.value_dim);
  }
  const bool all_finite = __syncthreads_and(is_finite) != 0;
  if (threadIdx.x != 0) return;
  params.keys_not_finite[block] = all_finite ? 0 : 1;
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

void prepare(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  with_storage_type(call.q.dtype, [&](auto type) {
    launch_blocks(queue, prepare_rows<decltype(type)>, params.num_row_tiles * call.num_heads,
                  kThreads, 0, params);
  });
  if (params.any_not_finite == nullptr) return;
  const std::int64_t blocks = params.num_key_tiles * call.num_kv_heads;
  launch_blocks(queue,
                call.k.dtype == DType::kF16 ? prepare_keys<__half> : prepare_keys<__nv_bfloat16>,
                blocks, kThreads, 0, params);
}

}  // namespace ladon::cuda::backward
