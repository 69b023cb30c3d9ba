// The kernel of decode_segments.cuh, and which calls have few enough segments for it.

#include "cuda/hopper/decode_segments.cuh"

#include <algorithm>

#include "core/integer.h"
#include "cuda/hopper/attend.h"
#include "cuda/kernels/forward_finish.h"

namespace ladon::cuda::hopper {
namespace {

/// What a block of threads needs for one segment, or for two short ones.
struct SegmentsMemory {
  union {
    SegmentMemory<kSegmentWarps> one;
    SegmentMemory<kPairWarps> pair[2];
  };
};

/// A tile is a KV head of a sequence. A block of threads has a segment of one, or, where kPairs,
/// the last segments of two.
template <class Half, bool kPairs>
__global__ void __launch_bounds__(32 * kSegmentWarps, 1)
    decode_segments(const __grid_constant__ ForwardParams<float> params) {
  extern __shared__ __align__(128) unsigned char shared[];
  auto& memory = *reinterpret_cast<SegmentsMemory*>(shared);
  wait_for_kernel_before();
  const auto kv_heads = static_cast<unsigned>(params.call.num_kv_heads);
  const unsigned tiles = static_cast<unsigned>(params.call.num_sequences) * kv_heads;
  const auto segments = static_cast<unsigned>(params.partials.segments);
  // The last segments come last: they may be short.
  const unsigned whole = (segments - 1) * tiles;
  const bool is_pair = kPairs && blockIdx.x >= whole;
  const unsigned first_tile = is_pair ? 2 * (blockIdx.x - whole) : blockIdx.x % tiles;
  const unsigned segment = is_pair ? segments - 1 : blockIdx.x / tiles;
  const auto task_of = [&](unsigned tile) {
    return ForwardTask(tile / kv_heads, tile % kv_heads, segment);
  };
  const unsigned own = is_pair ? threadIdx.x / (32 * kPairWarps) : 0;
  bool is_finite = true;
  if (!kPairs || first_tile + own < tiles) {
    const ForwardTask task = task_of(first_tile + own);
    const Sequence& sequence = sequence_of(params, task.sequence);
    is_finite =
        is_pair ? DecodeSegment<Half, kPairWarps>(params, task, sequence, memory.pair[own]).run()
                : DecodeSegment<Half, kSegmentWarps>(params, task, sequence, memory.one).run();
  }
  using Careful = ForwardTile<Half, 1, false, ForwardRules::kWindow>;
  static_assert(sizeof(typename Careful::Memory) <= sizeof(SegmentsMemory));
#pragma unroll 1
  for (unsigned i = 0; i < (kPairs ? 2 : 1); ++i) {
    if (!__syncthreads_or(own == i && !is_finite) || threadIdx.x >= 32) continue;
    const ForwardTask task = task_of(first_tile + i);
    Careful(params, task, sequence_of(params, task.sequence),
            *reinterpret_cast<typename Careful::Memory*>(shared))
        .run();
  }
  start_kernel_after();
}

/// Blocks of keys in the last of so many segments, of the sequence that has most.
std::int64_t last_segment_blocks(const AttentionParams& call, std::int64_t segments) {
  constexpr SegmentSize kSize = short_segments();
  std::int64_t most = 0;
  for (std::int64_t s = 0; s < call.num_sequences; ++s) {
    const Sequence& sequence = call.sequences[s];
    const std::int64_t first = kSize.of_key(sequence.key_origin);
    const std::int64_t end = ceil_div(sequence.key_origin + sequence.kv_len, kBlockKeys);
    most = std::max(most, end - (first + segments - 1) * kSize.blocks());
  }
  return most;
}

}  // namespace

bool decode_segments(Queue& queue, const AttentionParams& call, ForwardParams<float> params) {
  if (params.partials.maximum == nullptr || params.folded != 1 ||
      call.max_query_len * call.group > 16 || call.head_dim > kTileColumns ||
      call.value_dim > kTileColumns || !params.aligned_q || !params.aligned_k ||
      !params.aligned_v) {
    return false;
  }
  const std::int64_t tiles = call.num_sequences * call.num_kv_heads;
  const std::int64_t segments = params.partials.segments;
  const int processors = queue.num_multiprocessors();
  // Two in a row take longer than two warps for each of all segments, which run side by side (8193
  // tokens of 8 KV heads, 136 segments: 26 us instead of 24).
  const bool is_paired = tiles * segments > processors;
  const std::int64_t blocks =
      is_paired ? tiles * (segments - 1) + ceil_div(tiles, 2) : tiles * segments;
  if (blocks > processors || (is_paired && last_segment_blocks(call, segments) > kPairWarps)) {
    return false;
  }
  params.row_tiles = 1;
  params.value_chunks = 1;
  const auto launch = [&](auto kernel) {
    queue.launch(kernel,
                 {.blocks = dim3(static_cast<unsigned>(blocks)),
                  .threads = dim3(32 * kSegmentWarps),
                  .shared_bytes = sizeof(SegmentsMemory),
                  .starts_early = true},
                 params);
  };
  const auto launch_with = [&](auto element) {
    using Half = decltype(element);
    is_paired ? launch(decode_segments<Half, true>) : launch(decode_segments<Half, false>);
  };
  call.q.dtype == DType::kF16 ? launch_with(__half{}) : launch_with(__nv_bfloat16{});
  fold_partials(queue, params, 1);
  return true;
}

}  // namespace ladon::cuda::hopper
