// The interface between the CPU backend's drivers and its kernels: one table of functions per
// instruction set. They take plain structs, never allocate and never throw.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/attention_params.h"
#include "core/kv_params.h"
#include "core/norm_params.h"
#include "core/optimiser_params.h"
#include "core/projection_params.h"
#include "core/sum_params.h"
#include "cpu/cache_sizes.h"

namespace ladon::cpu {

/// Where a forward kernel writes: the caller's tensors, or partial results over some of the keys.
/// `data` and `lse` point at the sequence's token 0 and the first head of the task's first group.
struct ForwardOutput {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t token_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t kv_head_stride = 0;  // from one group to the next
  LseOperand lse;                   // data may be null
  std::int64_t lse_kv_head_stride = 0;
  bool add_sinks = true;
};

/// Rows [row_begin, row_begin + row_count) of one KV head against keys [key_begin, key_end). A task
/// for forward_tile is a row strip: a few tiles of query rows that share each block of keys. A task
/// for forward_decode has the rows of several KV heads.
struct ForwardTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t kv_head_count = 1;
  std::int64_t row_begin = 0;
  std::int64_t row_count = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  ForwardOutput output;
};

/// Most tiles of a row strip. The more tiles share each block of keys and values, the less is read;
/// their q and their sums must stay in L2 together with the block and its successor, which is being
/// prefetched (64 KiB each at head_dim 128), and with what the other tiles of the task displaced.
/// A quarter of L2 is the measured optimum at 1 MiB: an eighth is 4 % slower, a half no faster.
inline constexpr std::int64_t kMostTiles = 8;
inline std::int64_t tiles_at_once(const AttentionParams& params, std::int64_t tile_rows,
                                  std::int64_t compute_bytes) {
  const std::int64_t tiles =
      cache_sizes().l2 / 4 / (tile_rows * (params.head_dim + params.value_dim) * compute_bytes);
  if (tiles < 1) return 1;
  return tiles < kMostTiles ? tiles : kMostTiles;
}

/// Whether decoding `heads` KV heads streams tokens: reads all heads of a few tokens, then those of
/// the next few, in the order in which they are stored, and prefetches a few tokens ahead of that.
/// Otherwise a head's block is read at a time, and the next block is prefetched into L2. Those
/// prefetches hold the core's miss buffers while blocks are read from L2: 21 ns for a key and head
/// of 256 + 256 bytes and one query row (Zen 5, one core), the sum of 12 from memory and 8 from L2.
/// Streamed 17. Blocks of few heads or short tokens are nearly in the order of memory anyway, and a
/// mask must look at a block's values first.
inline bool streams_tokens(const AttentionParams& params, std::int64_t heads) {
  constexpr std::int64_t kFewestHeads = 4;
  constexpr std::int64_t kLeastBytes = 1024;
  const auto size = static_cast<std::int64_t>(size_of(params.k.dtype));
  return heads >= kFewestHeads && heads * params.head_dim * size >= kLeastBytes &&
         params.k.token_stride > params.k.head_stride && params.kv_layout.k_scales == nullptr &&
         params.rules.mask.data == nullptr && params.rules.bias.data == nullptr;
}

/// What the backward pass normalises each row with: P = exp(score - shift) * factor, elements of
/// the compute type.
struct RowScales {
  void* shift = nullptr;  // +inf for a row that sees no key
  void* factor = nullptr;
  const std::int64_t* first_token = nullptr;  // of each sequence, among the tokens of all

  std::int64_t row(const AttentionParams& params, std::int64_t sequence, std::int64_t token,
                   std::int64_t head) const {
    return (first_token[sequence] + token) * params.num_heads + head;
  }
};

/// Writes the scales of all rows of one KV head.
struct RowScalesTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  RowScales scales;
};

/// All rows of one KV head against keys [key_begin, key_end), at most kBackwardKeys of them. Writes
/// the dk and dv of those keys, and adds its part of dq to `dq_partial`,
/// [tile][head_dim][tile_rows].
struct BackwardTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  void* dq_partial = nullptr;
  RowScales scales;
};
inline constexpr std::int64_t kBackwardKeys = 256;

/// Sums `partial_count` partial dq, `partial_stride` elements apart, and writes dq of one tile.
struct CombineDqTask {
  std::int64_t sequence = 0;
  std::int64_t kv_head = 0;
  std::int64_t tile = 0;
  const void* partials = nullptr;
  std::int64_t partial_stride = 0;
  std::int64_t partial_count = 0;
};

/// Adds the gradients of the biased scores of tokens [token_begin, token_end) and keys [key_begin,
/// key_end) to sums[token][key], over one sequence or all, one head or all. A stride of 0 sums that
/// dimension as well.
struct BiasGradientTask {
  std::int64_t sequence = -1;  // -1: all
  std::int64_t head = -1;      // -1: all
  std::int64_t token_begin = 0;
  std::int64_t token_end = 0;
  std::int64_t key_begin = 0;
  std::int64_t key_end = 0;
  double* sums = nullptr;
  std::int64_t token_stride = 0;
  std::int64_t key_stride = 0;
  RowScales scales;
};

/// Writes the gradient of one head's sink, summed over all sequences and tokens.
struct SinkGradientTask {
  std::int64_t head = 0;
  double* sum = nullptr;
  RowScales scales;
};

/// A block of a projection's result: rows and out_features of y, rows and in_features of dx, or
/// out_features and in_features of dw. At most kProjectionTile rows and columns; y may have up to
/// KernelSet::project_columns columns.
struct ProjectionTask {
  std::int64_t row_begin = 0;
  std::int64_t row_end = 0;
  std::int64_t column_begin = 0;
  std::int64_t column_end = 0;
};
inline constexpr std::int64_t kProjectionTile = 64;
inline constexpr std::int64_t kProjectColumns = 512;

/// Rows [begin, end).
struct RowRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Elements [begin, end) of dense arrays.
struct ElementRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;
};

/// Rows [begin, end) of a norm. Backward adds their part of the weight's gradient to `sums`.
struct NormTask {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  const double* weight = nullptr;  // [weight_rows, dim]
  double* sums = nullptr;          // [weight_rows, dim]
};
/// The norm kernels pad rows to a multiple of this many elements.
inline constexpr std::int64_t kNormUnit = 32;

/// Tokens [begin, end) of one run of consecutive slots.
struct KvRowsTask {
  std::int64_t run = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  bool streams = false;  // the operation writes more than the caches hold
};

/// A worker's memory for a kernel: as many bytes as the kernel's own function of that name with
/// _scratch says.
struct Scratch {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};
/// It must be aligned to this.
inline constexpr std::size_t kScratchAlignment = 64;

/// The kernels of one compute type: float serves f32, f16 and bf16; double serves f64.
struct KernelSet {
  std::size_t compute_bytes = 0;   // of one element
  std::int64_t tile_rows = 0;      // query rows of a tile
  std::int64_t decode_rows = 0;    // most rows per KV head of a task for forward_decode
  std::int64_t decode_states = 0;  // most rows of all KV heads of such a task
  std::int64_t project_columns = kProjectColumns;  // most columns of a task for project
#define LADON_KERNEL(name, Params, Task)                                           \
  void (*name)(const Params& params, const Task& task, Scratch scratch) = nullptr; \
  std::size_t (*name##_scratch)(const Params& params) = nullptr;
#include "cpu/kernels.def"
#undef LADON_KERNEL
};

struct KernelTable {
  KernelSet f32;
  KernelSet f64;
  KernelSet bf16;  // for q, k and v (or a projection's x) that are all bf16; may equal f32
};

/// The kernels for one call.
inline const KernelSet& kernels_of(const KernelTable& table, const AttentionParams& params) {
  if (params.q.dtype == DType::kF64) return table.f64;
  const bool all_bf16 = params.q.dtype == DType::kBF16 && params.k.dtype == DType::kBF16 &&
                        params.v.dtype == DType::kBF16;
  return all_bf16 ? table.bf16 : table.f32;
}

inline constexpr const char* kKernelNames[] = {
#define LADON_KERNEL(name, Params, Task) #name "_f32", #name "_f64",
#include "cpu/kernels.def"
#undef LADON_KERNEL
};

}  // namespace ladon::cpu
