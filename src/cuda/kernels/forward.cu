// attend(): chooses the forward kernel, and folds segments that were computed apart.
//
// Which kernel computes a call depends on its dtypes, head_dim and rules; how many rows it has
// changes the shape of the kernel but not the arithmetic. Few rows over many keys (decoding) are
// computed segment by segment, each by a block of threads, and folded by a second kernel.

#include <algorithm>
#include <numbers>
#include <optional>

#include "core/fail.h"
#include "cuda/hopper/attend.h"
#include "cuda/hopper/attend_latents.h"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/forward.cuh"
#include "cuda/kernels/forward_finish.h"
#include "cuda/kernels/forward_fold.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/tile_stream.cuh"
#include "cuda/operations.h"
#include "cuda/sequences.h"

namespace ladon::cuda {
namespace {

// Rows a KV head up to which segments are computed apart. Their results take rows * segments of
// memory, which is linear in the number of keys because this is a constant.
constexpr std::int64_t kMostSplitRows = 256;
// Longer heads would not leave room for the queries in shared memory.
constexpr std::int64_t kLongestMmaHead = 640;

constexpr int kFoldWarps = 4;  // of a block

/// Folds segments that were computed apart: a warp for each row and 32 kColumns columns.
template <int kColumns, class Compute, class Exp>
__global__ void __launch_bounds__(kFoldWarps* kWarp)
    fold_segments(const __grid_constant__ FoldParams<Compute, Exp> params) {
  take_over();
  const AttentionParams& call = params.forward.call;
  // Divisions of 64 bits would take as long as the rest.
  const auto rows = static_cast<unsigned>(params.forward.partials.rows);
  const auto kv_heads = static_cast<unsigned>(call.num_kv_heads);
  constexpr int kWarpColumns = kColumns * kWarp;
  const auto warps = static_cast<unsigned>(ceil_div(call.value_dim, kWarpColumns));  // of a row
  const unsigned index = blockIdx.x * kFoldWarps + threadIdx.x / kWarp;
  const unsigned column = index % warps * kWarpColumns;
  const unsigned row = index / warps % rows;
  const unsigned place = index / warps / rows;
  if (place >= call.num_sequences * call.num_kv_heads) return;
  const Sequence& sequence = sequence_of(params.forward, place / kv_heads);
  if (row >= sequence.query_len * call.group) return;
  fold_columns<kColumns>(params, sequence, place, row, column);
}

/// Whether every row of an operand starts at a multiple of `bytes` and has whole multiples.
bool is_aligned(const AttentionParams& call, const Operand& operand, std::int64_t Sequence::*start,
                std::int64_t dim, std::int64_t bytes) {
  const std::int64_t elements = bytes / static_cast<std::int64_t>(size_of(operand.dtype));
  const auto fits = [elements](std::int64_t count) { return count % elements == 0; };
  if (reinterpret_cast<std::uintptr_t>(operand.data) % static_cast<std::uintptr_t>(bytes) != 0 ||
      !fits(operand.token_stride) || !fits(operand.head_stride) || !fits(dim)) {
    return false;
  }
  return std::all_of(call.sequences, call.sequences + call.num_sequences,
                     [&](const Sequence& sequence) { return fits(sequence.*start); });
}

/// Segments of sequences.
struct SegmentCounts {
  std::int64_t most = 0;  // of one
  std::int64_t all = 0;

  SegmentCounts(const AttentionParams& call, SegmentSize size) {
    for (std::int64_t s = 0; s < call.num_sequences; ++s) {
      const Sequence& sequence = call.sequences[s];
      if (sequence.kv_len == 0) continue;
      const std::int64_t last = size.of_key(sequence.key_origin + sequence.kv_len - 1);
      const std::int64_t count = last - size.of_key(sequence.key_origin) + 1;
      most = std::max(most, count);
      all += count;
    }
  }
};

/// How many first segments of a sequence one warp folds where there are many: what each of the
/// warps that run at a time has to do. Segments that are left over even out the end.
std::int64_t folded_segments(const Queue& queue, const AttentionParams& call,
                             const SegmentCounts& segments) {
  const std::int64_t warps = 4 * queue.num_multiprocessors();
  const std::int64_t share = segments.all * call.num_kv_heads / warps;
  // Rounded up, so that equally long sequences leave nothing over.
  const std::int64_t folded = share <= 1 ? 1 : share + 1;
  return std::min(folded, std::max(segments.most, std::int64_t{1}));
}

bool uses_tensor_cores(const AttentionParams& call) {
  const bool is_half = call.q.dtype == DType::kF16 || call.q.dtype == DType::kBF16;
  const bool is_scaled = call.kv_layout.k_scales != nullptr;
  const bool same = call.k.dtype == call.q.dtype && call.v.dtype == call.q.dtype;
  if (call.out.dtype != call.q.dtype) return false;  // they store what they multiply
  constexpr std::int64_t kMostKeys = std::int64_t{1} << 30;
  return is_half && (same || is_scaled) && call.head_dim <= kLongestMmaHead &&
         call.max_query_len * call.group < kMostKeys && call.max_kv_len < kMostKeys &&
         call.kv_layout.page_size < kMostKeys;
}

/// Nothing but a positive scale and a window: scores keep the units of q.k.
bool is_plain(const AttentionParams& call) {
  return call.rules.scale > 0 && only_scale_and_window(call.rules);
}

/// Memory for segments that are computed apart.
template <class Compute>
class PartialMemory {
 public:
  PartialMemory(Queue& queue, const AttentionParams& call, std::int64_t segments)
      : partials_{nullptr, nullptr, nullptr, segments, call.max_query_len * call.group} {
    const std::int64_t states = call.num_sequences * call.num_kv_heads * segments * partials_.rows;
    if (segments <= 1 || partials_.rows > kMostSplitRows || states == 0) return;
    const std::int64_t elements = states * (2 + call.value_dim);
    memory_.emplace(queue.scratch(), static_cast<std::size_t>(elements) * sizeof(Compute));
    partials_.maximum = reinterpret_cast<Compute*>(memory_->data());
    partials_.sum = partials_.maximum + states;
    partials_.out = partials_.sum + states;
  }

  const Partials<Compute>& partials() const { return partials_; }

 private:
  std::optional<Workspace> memory_;
  Partials<Compute> partials_;
};

template <class Compute, class Exp>
void fold(Queue& queue, const FoldParams<Compute, Exp>& params) {
  const AttentionParams& call = params.forward.call;
  const std::int64_t rows = call.num_sequences * call.num_kv_heads * params.forward.partials.rows;
  const auto launch = [&](auto kernel, int columns) {
    queue.launch(
        kernel,
        {.blocks = blocks_for(rows * ceil_div(call.value_dim, columns * kWarp), kFoldWarps),
         .threads = kFoldWarps * kWarp,
         .starts_early = true},
        params);
  };
  // With many rows instructions are the limit, and what a warp does for its row serves more
  // columns.
  rows >= 4 * queue.num_multiprocessors() ? launch(fold_segments<4, Compute, Exp>, 4)
                                          : launch(fold_segments<1, Compute, Exp>, 1);
}

/// Launches the kernel for all tasks, then folds.
template <class Compute, class Launch, class Exp>
void run(Queue& queue, ForwardParams<Compute>& params, std::int64_t rows_per_tile,
         const Launch& launch, Exp exp_of, Compute unit) {
  const AttentionParams& call = params.call;
  params.row_tiles = (call.max_query_len * call.group + rows_per_tile - 1) / rows_per_tile;
  params.value_chunks = (call.value_dim + kTileColumns - 1) / kTileColumns;
  const bool is_split = params.partials.maximum != nullptr;
  const std::int64_t tasks = call.num_sequences * call.num_kv_heads * params.value_chunks *
                             params.row_tiles *
                             (is_split ? params.partials.segments - params.folded + 1 : 1);
  constexpr std::int64_t kMostTasks = (std::int64_t{1} << 31) - 1;
  if (tasks > kMostTasks) {
    fail(ErrorCode::kUnsupported, "attention", "q",
         "got " + std::to_string(tasks) + " tiles of work, expected at most 2^31 - 1");
  }
  if (tasks == 0) return;
  launch(tasks, params);
  if (is_split) fold(queue, FoldParams<Compute, Exp>{params, exp_of, unit, params.folded});
}

}  // namespace

void fold_partials(Queue& queue, const ForwardParams<float>& params, std::int64_t folded) {
  const float unit = params.call.q.dtype == DType::kBF16 ? 1.0F : 128.0F;
  fold(queue, FoldParams<float, Base2Exp>{params, Base2Exp{params.factor}, unit, folded});
}

void attend(Queue& queue, const AttentionParams& call) {
  if (call.num_sequences == 0 || call.max_query_len == 0 || call.num_heads == 0) return;
  const std::int64_t rows = call.max_query_len * call.group;
  const bool is_scaled = call.kv_layout.k_scales != nullptr;
  const SegmentSize segment_size = uses_tensor_cores(call) && !is_scaled
                                       ? segment_size_of(call.head_dim, call.value_dim)
                                       : short_segments();
  const SegmentCounts segments(call, segment_size);
  if (uses_tensor_cores(call)) {
    const bool is_bf16 = call.q.dtype == DType::kBF16;
    const bool is_window = is_plain(call) && !is_scaled;
    const bool few_rows = rows <= mma_rows(true);
    const bool takes_latents =
        is_hopper(queue.kernels()) && is_window && hopper::takes_latents(call);
    // Page tables are too long for the params.
    const bool in_params = is_window && few_rows && !takes_latents &&
                           call.num_sequences <= kFewSequences && call.kv_layout.page_size == 0;
    std::optional<DeviceSequences> sequences;
    if (!in_params) sequences.emplace(queue, call);
    ForwardParams<float> params;
    if (in_params) {
      params.call = call;
      params.call.sequences = nullptr;
      std::copy_n(call.sequences, call.num_sequences, params.few);
    } else {
      params.call = sequences->params();
    }
    params.segment_size = segment_size;
    const double log2e = std::numbers::log2e;
    params.only_scales = is_scaled && is_plain(call);
    params.aligned_q = is_aligned(call, call.q, &Sequence::q, call.head_dim, 16);
    params.aligned_k = is_aligned(call, call.k, &Sequence::k, call.head_dim, 16);
    params.aligned_v = is_aligned(call, call.v, &Sequence::v, call.value_dim, 16);
    params.aligned_out = is_aligned(call, call.out, &Sequence::out, 8, 16);
    ForwardKind kind{.few_rows = few_rows, .streamed = is_streamed(params)};
    if (is_window) kind.rules = ForwardRules::kWindow;
    const bool keeps_bytes = params.only_scales && kind.few_rows && !kind.streamed &&
                             params.aligned_k && params.aligned_v;
    params.factor = static_cast<float>(is_window ? call.rules.scale * log2e : log2e);
    params.natural = is_window ? static_cast<float>(call.rules.scale) : 1.0F;
    if (call.rules.dropout) params.kept_factor = static_cast<float>(call.rules.dropout_scale);
    if (takes_latents && hopper::attend_latents(queue, call, params, segments.most)) return;
    if (is_window && rows <= 8 && !kind.streamed && call.value_dim <= kTileColumns) {
      params.folded = folded_segments(queue, call, segments);
      kind.chains = params.folded > 1;
    }
    const bool folds_all = kind.chains && params.folded == segments.most;
    const PartialMemory<float> memory(queue, call, folds_all ? 1 : segments.most);
    params.partials = memory.partials();
    if (folds_all) params.folded = 1;
    if (is_hopper(queue.kernels()) &&
        ((is_window && hopper::decode_segments(queue, call, params)) ||
         hopper::decode_long_heads(queue, call, params, kind.rules) ||
         hopper::attend(queue, call, params, kind.rules))) {
      return;
    }
    run(
        queue, params, mma_rows(kind.few_rows),
        [&](std::int64_t tasks, const ForwardParams<float>& ready) {
          if (keeps_bytes) {
            is_bf16 ? launch_decode_scaled_bf16(queue, tasks, ready)
                    : launch_decode_scaled_f16(queue, tasks, ready);
          } else {
            is_bf16 ? launch_forward_bf16(queue, kind, tasks, ready)
                    : launch_forward_f16(queue, kind, tasks, ready);
          }
        },
        Base2Exp{params.factor}, is_bf16 ? 1.0F : 128.0F);
    return;
  }
  const DeviceSequences sequences(queue, call);
  const bool is_f64 = call.q.dtype == DType::kF64;
  const ForwardKind kind{.few_rows = rows <= simt_rows(true, is_f64)};
  const auto run_simt = [&]<class Compute>(Compute one, const auto& launch) {
    const PartialMemory<Compute> memory(queue, call, segments.most);
    ForwardParams<Compute> params;
    params.call = sequences.params();
    params.segment_size = segment_size;
    params.partials = memory.partials();
    run(
        queue, params, simt_rows(kind.few_rows, is_f64),
        [&](std::int64_t tasks, const ForwardParams<Compute>& ready) {
          launch(queue, kind, tasks, ready);
        },
        NaturalExp<Compute>{}, one);
  };
  is_f64 ? run_simt(1.0, launch_forward_f64) : run_simt(1.0F, launch_forward_f32);
}

}  // namespace ladon::cuda
