// attend_backward(): statistics of rows, then dk and dv, dq, and the gradients of bias and sinks.
//
// prepare_rows: delta = rowsum(dout * out) - dlse, a block for each 64 rows of a head and a warp
// for each row at a time. It also finds the rows and tiles that tensor cores need to know about, as
// prepare_keys does for k and v. Reads q, out and dout (k and v) once: the limit is memory.

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <vector>

#include "core/integer.h"
#include "cuda/kernels/backward.cuh"
#include "cuda/operations.h"
#include "cuda/sequences.h"

namespace ladon::cuda {
namespace backward {
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
    zero_padding(const __grid_constant__ PaddingParams params) {
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

bool use_tensor_cores(const AttentionParams& call) {
  const DType dtype = call.q.dtype;
  return (dtype == DType::kF16 || dtype == DType::kBF16) && call.k.dtype == dtype &&
         call.head_dim <= 128 && call.value_dim <= 128;
}

/// Whether all rows of an operand of 16-bit elements begin at multiples of 16 bytes.
bool has_aligned_rows(const AttentionParams& call, const Operand& operand,
                      std::int64_t Sequence::*offset) {
  if (reinterpret_cast<std::uintptr_t>(operand.data) % 16 != 0) return false;
  if (operand.token_stride % 8 != 0 || operand.head_stride % 8 != 0) return false;
  return std::all_of(call.sequences, call.sequences + call.num_sequences,
                     [&](const Sequence& sequence) { return sequence.*offset % 8 == 0; });
}

/// Counts of rows and tiles before each sequence; the last of each list is the total. One block of
/// memory, because it is one copy to the device, with a 0 for any_not_finite at the end.
class TileStarts {
 public:
  explicit TileStarts(const AttentionParams& call)
      : size_(static_cast<std::size_t>(call.num_sequences) + 1), list_(3 * size_ + 1) {
    const auto tiles = [](std::int64_t n) { return (n + kTile - 1) / kTile; };
    for (std::size_t s = 0; s + 1 < size_; ++s) {
      const Sequence& sequence = call.sequences[s];
      list_[s + 1] = list_[s] + sequence.query_len;
      list_[size_ + s + 1] = list_[size_ + s] + tiles(sequence.query_len);
      list_[2 * size_ + s + 1] = list_[2 * size_ + s] + tiles(sequence.kv_len);
    }
  }

  std::int64_t num_rows() const { return list_[size_ - 1]; }
  std::int64_t num_row_tiles() const { return list_[2 * size_ - 1]; }
  std::int64_t num_key_tiles() const { return list_[3 * size_ - 1]; }
  std::size_t bytes() const { return list_.size() * sizeof(std::int64_t); }

  void upload(Queue& queue, std::byte* to, BackwardParams& params) const {
    queue.upload(to, list_.data(), bytes());
    auto* const list = reinterpret_cast<std::int64_t*>(to);
    params.row_starts = list;
    params.row_tile_starts = list + size_;
    params.key_tile_starts = list + 2 * size_;
    params.num_rows = num_rows();
    params.num_row_tiles = num_row_tiles();
    params.num_key_tiles = num_key_tiles();
    params.any_not_finite = reinterpret_cast<unsigned*>(list + 3 * size_);
  }

 private:
  std::size_t size_;
  std::vector<std::int64_t> list_;
};

/// All memory of a call, taken before its first kernel.
class BackwardMemory {
 public:
  BackwardMemory(Queue& queue, const AttentionParams& call)
      : BackwardMemory(queue, call, TileStarts(call)) {}

  const BackwardParams& params() const noexcept { return params_; }

 private:
  BackwardMemory(Queue& queue, const AttentionParams& call, const TileStarts& starts)
      : sequences_(queue, call),
        starts_(queue.scratch(), starts.bytes()),
        stats_(queue.scratch(), stats_bytes(call, starts)),
        live_rows_(queue.scratch(),
                   saturating_product(sizeof(std::uint64_t), row_flags(call, starts))),
        rows_not_finite_(queue.scratch(), row_flags(call, starts)),
        keys_not_finite_(queue.scratch(), key_flags(call, starts)) {
    params_.call = sequences_.params();
    params_.aligned = {has_aligned_rows(call, call.q, &Sequence::q),
                       has_aligned_rows(call, call.k, &Sequence::k),
                       has_aligned_rows(call, call.v, &Sequence::v),
                       has_aligned_rows(call, call.dout, &Sequence::dout)};
    starts.upload(queue, starts_.data(), params_);
    params_.stats = stats_.data();
    params_.live_rows = reinterpret_cast<std::uint64_t*>(live_rows_.data());
    params_.rows_not_finite = reinterpret_cast<std::uint8_t*>(rows_not_finite_.data());
    params_.keys_not_finite = reinterpret_cast<std::uint8_t*>(keys_not_finite_.data());
    if (!use_tensor_cores(call)) params_.any_not_finite = nullptr;
  }

  static std::size_t heads_times(std::int64_t heads, std::int64_t count) {
    return saturating_product(static_cast<std::size_t>(heads), static_cast<std::size_t>(count));
  }
  static std::size_t stats_bytes(const AttentionParams& call, const TileStarts& starts) {
    const std::size_t bytes =
        call.q.dtype == DType::kF64 ? sizeof(RowStats<double>) : sizeof(RowStats<float>);
    return saturating_product(bytes, heads_times(call.num_heads, starts.num_rows()));
  }
  static std::size_t row_flags(const AttentionParams& call, const TileStarts& starts) {
    if (!use_tensor_cores(call)) return 0;
    return heads_times(call.num_heads, starts.num_row_tiles());
  }
  static std::size_t key_flags(const AttentionParams& call, const TileStarts& starts) {
    if (!use_tensor_cores(call)) return 0;
    return heads_times(call.num_kv_heads, starts.num_key_tiles());
  }

  DeviceSequences sequences_;
  Workspace starts_;
  Workspace stats_;
  Workspace live_rows_;
  Workspace rows_not_finite_;
  Workspace keys_not_finite_;
  BackwardParams params_;
};

void zero_padding_of(Queue& queue, const AttentionParams& host_call, const BackwardParams& params,
                     bool of_keys) {
  const AttentionParams& call = params.call;
  const Operand& result = of_keys ? call.dk : call.dv;
  if (result.data == nullptr) return;
  std::int64_t most = 0;
  for (std::int64_t s = 0; s < call.num_sequences; ++s) {
    most = std::max(most, call.padded_kv_len - host_call.sequences[s].kv_len);
  }
  const std::int64_t dim = of_keys ? call.head_dim : call.value_dim;
  const std::int64_t count = call.num_sequences * most * call.num_kv_heads * dim;
  const std::int64_t blocks = std::min<std::int64_t>(
      (count + kThreads - 1) / kThreads, std::int64_t{16} * queue.num_multiprocessors());
  queue.launch(zero_padding, Grid{dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
               PaddingParams{call.sequences, call.num_sequences, most, call.padded_kv_len,
                             call.num_kv_heads, dim, result, of_keys});
}

void prepare(Queue& queue, const BackwardParams& params) {
  const AttentionParams& call = params.call;
  with_storage_type(call.q.dtype, [&](auto type) {
    launch_blocks(queue, prepare_rows<decltype(type)>, params.num_row_tiles * call.num_heads,
                  kThreads, 0, params);
  });
  if (!use_tensor_cores(call)) return;
  const std::int64_t blocks = params.num_key_tiles * call.num_kv_heads;
  launch_blocks(queue,
                call.k.dtype == DType::kF16 ? prepare_keys<__half> : prepare_keys<__nv_bfloat16>,
                blocks, kThreads, 0, params);
}

}  // namespace
}  // namespace backward

void attend_backward(Queue& queue, const AttentionParams& call) {
  using namespace backward;
  const BackwardMemory memory(queue, call);
  const BackwardParams& params = memory.params();
  const bool tensor_cores = use_tensor_cores(call);
  zero_padding_of(queue, call, params, true);
  zero_padding_of(queue, call, params, false);
  prepare(queue, params);
  // After the tensor cores, SIMT computes the tiles that they left out; otherwise all.
  if (call.dk.data != nullptr || call.dv.data != nullptr) {
    if (tensor_cores) mma_dkdv(queue, params);
    simt_dkdv(queue, params);
  }
  if (call.dq.data != nullptr) {
    if (tensor_cores) mma_dq(queue, params);
    simt_dq(queue, params);
  }
  if (call.dbias.data != nullptr) bias_gradient(queue, params);
  if (call.dsinks.data != nullptr) sink_gradient(queue, params);
}

}  // namespace ladon::cuda
