// Launches decode_segments.cuh where a call has few segments.

#include "cuda/hopper/decode_segments.cuh"

#include "cuda/hopper/attend.h"
#include "cuda/kernels/forward_finish.h"

namespace ladon::cuda::hopper {

bool decode_segments(Queue& queue, const AttentionParams& call, ForwardParams<float> params) {
  if (params.partials.maximum == nullptr || params.folded != 1 ||
      call.max_query_len * call.group > 16 || call.head_dim > kTileColumns ||
      call.value_dim > kTileColumns || !params.aligned_q || !params.aligned_k ||
      !params.aligned_v) {
    return false;
  }
  const std::int64_t tasks = call.num_sequences * call.num_kv_heads * params.partials.segments;
  // A second wave costs more than is won: two warps for each segment can run side by side (8193
  // tokens of 8 KV heads, 136 segments: 26 us instead of 24).
  if (tasks > queue.num_multiprocessors()) return false;
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
