// Launches decode_segments.cuh where a call has few segments.

#include "cuda/hopper/decode_segments.cuh"

#include "cuda/hopper/attend.h"
#include "cuda/kernels/forward_finish.h"

namespace ladon::cuda::hopper {

namespace {

/// Whether the keys are enough for one segment a multiprocessor and no more. Else two warps or one
/// for each segment are as fast: they run together.
bool is_one_wave(const Queue& queue, const AttentionParams& call) {
  std::int64_t keys = 0;
  for (std::int64_t s = 0; s < call.num_sequences; ++s) keys += call.sequences[s].kv_len;
  return keys * call.num_kv_heads <= queue.num_multiprocessors() * std::int64_t{kSegmentKeys};
}

}  // namespace

bool decode_segments(Queue& queue, const AttentionParams& call, ForwardParams<float> params) {
  if (params.partials.maximum == nullptr || params.folded != 1 ||
      call.max_query_len * call.group > 16 || call.head_dim > kTileColumns ||
      call.value_dim > kTileColumns || !params.aligned_q || !params.aligned_k ||
      !params.aligned_v || !is_one_wave(queue, call)) {
    return false;
  }
  const std::int64_t tasks = call.num_sequences * call.num_kv_heads * params.partials.segments;
  if (tasks > 2 * queue.num_multiprocessors()) return false;  // most of them have no keys
  params.row_tiles = 1;
  params.value_chunks = 1;
  const auto launch = [&](auto element) {
    using Half = decltype(element);
    queue.launch(decode_segments<Half>,
                 {.blocks = dim3(static_cast<unsigned>(tasks)),
                  .threads = dim3(32 * kSegmentWarps),
                  .shared_bytes = sizeof(SegmentMemory<Half>),
                  .starts_early = true},
                 params);
  };
  call.q.dtype == DType::kF16 ? launch(__half{}) : launch(__nv_bfloat16{});
  fold_partials(queue, params, 1);
  return true;
}

}  // namespace ladon::cuda::hopper
