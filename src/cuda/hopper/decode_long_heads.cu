// The kernel of decode_long_heads.cuh, and which calls it takes.

#include "cuda/hopper/decode_long_heads.cuh"

#include <algorithm>

#include "cuda/hopper/attend.h"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/forward_finish.h"

namespace ladon::cuda::hopper {
namespace {

/// A block of threads has a segment of one KV head of a sequence. The last segments come last: they
/// may be short.
__device__ __forceinline__ ForwardTask task_of(const AttentionParams& call, unsigned block) {
  const auto kv_heads = static_cast<unsigned>(call.num_kv_heads);
  const unsigned tiles = static_cast<unsigned>(call.num_sequences) * kv_heads;
  const unsigned tile = block % tiles;
  return {tile / kv_heads, tile % kv_heads, block / tiles};
}

template <class Half, ForwardRules kRules>
__device__ __forceinline__ bool decode_segment(const ForwardParams<float>& params,
                                               LongHeadMemory<Half>& memory) {
  const ForwardTask task = task_of(params.call, blockIdx.x);
  return DecodeLongHead<Half, kRules>(params, task, sequence_of(params, task.sequence), memory)
      .run();
}

template <class Half, ForwardRules kRules>
__global__ void __launch_bounds__(32 * kLongWarps, 1)
    decode_long_heads(const __grid_constant__ ForwardParams<float> params) {
  using Memory = LongHeadMemory<Half>;
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_kernel_before();
  const bool is_finite = decode_segment<Half, kRules>(params, *reinterpret_cast<Memory*>(shared));
  using Careful = ForwardTile<Half, 1, true, kRules>;
  static_assert(sizeof(typename Careful::Memory) + 2 * Careful::Memory::kQueryBytes <=
                sizeof(Memory));
  if (__syncthreads_or(!is_finite) && threadIdx.x < 32) {
#pragma unroll 1
    for (int chunk = 0; chunk * kTileColumns < params.call.value_dim; ++chunk) {
      // The task again, so that it does not take registers before.
      ForwardTask task = task_of(params.call, fresh(blockIdx.x));
      task.value_chunk = chunk;
      Careful(params, task, sequence_of(params, task.sequence),
              *reinterpret_cast<typename Careful::Memory*>(shared))
          .run();
      __syncwarp();
    }
  }
  start_kernel_after();
}

/// Whether slots, and the bytes from one to the next, fit the kernel's 32 bits. Those of page
/// tables do: 2^31 slots of such heads are more memory than a GPU has.
bool fits_32_bits(const AttentionParams& call) {
  constexpr std::int64_t kMost = std::int64_t{1} << 30;
  if (call.k.token_stride >= kMost || call.v.token_stride >= kMost) return false;
  return std::all_of(
      call.sequences, call.sequences + call.num_sequences, [&](const Sequence& sequence) {
        const std::int64_t slots = std::max(call.kv_layout.ring_slots, sequence.kv_len);
        return sequence.first_slot + slots < kMost;
      });
}

}  // namespace

bool decode_long_heads(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
                       ForwardRules rules) {
  const bool is_split = params.partials.maximum != nullptr;
  const std::int64_t segments = is_split ? params.partials.segments : 1;
  const std::int64_t blocks = call.num_sequences * call.num_kv_heads * segments;
  if (params.segment_size.log2_blocks != long_segments().log2_blocks || params.folded != 1 ||
      call.rules.dropout || call.kv_layout.k_scales != nullptr ||
      params.partials.segments > segments || call.max_query_len * call.group > 16 ||
      !params.aligned_q || !params.aligned_k || !params.aligned_v || !fits_32_bits(call) ||
      blocks >= std::int64_t{1} << 31) {
    return false;
  }
  params.row_tiles = 1;
  params.value_chunks = 1;
  const auto launch = [&](auto kernel) {
    queue.launch(kernel,
                 {.blocks = dim3(static_cast<unsigned>(blocks)),
                  .threads = dim3(32 * kLongWarps),
                  .shared_bytes = sizeof(LongHeadMemory<__half>),
                  .starts_early = true},
                 params);
  };
  const auto launch_with = [&](auto element) {
    using Half = decltype(element);
    rules == ForwardRules::kWindow ? launch(decode_long_heads<Half, ForwardRules::kWindow>)
                                   : launch(decode_long_heads<Half, ForwardRules::kAll>);
  };
  call.q.dtype == DType::kF16 ? launch_with(__half{}) : launch_with(__nv_bfloat16{});
  if (is_split) fold_partials(queue, params, 1);
  return true;
}

}  // namespace ladon::cuda::hopper
