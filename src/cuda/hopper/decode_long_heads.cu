// The kernel of decode_long_heads.cuh, and which calls it takes.

#include "cuda/hopper/decode_long_heads.cuh"

#include <algorithm>

#include "core/integer.h"
#include "cuda/hopper/attend.h"
#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/forward_finish.h"

namespace ladon::cuda::hopper {
namespace {

/// A block of threads has a segment of one KV head of a sequence, or, where a warp has 16 columns
/// of values, 128 columns of it. The last segments come last: they may be short.
template <int kColumns>
__device__ __forceinline__ ForwardTask task_of(const ForwardParams<float>& params, unsigned block) {
  const auto kv_heads = static_cast<unsigned>(params.call.num_kv_heads);
  const unsigned tiles = static_cast<unsigned>(params.call.num_sequences) * kv_heads;
  const auto chunks = kColumns == 32 ? 1U : static_cast<unsigned>(params.value_chunks);
  const unsigned place = block / chunks;
  const unsigned tile = place % tiles;
  ForwardTask task(tile / kv_heads, tile % kv_heads, place / tiles);
  task.value_chunk = block % chunks;
  return task;
}

template <class Half, ForwardRules kRules, int kColumns>
__device__ __forceinline__ bool decode_segment(const ForwardParams<float>& params,
                                               LongHeadMemory<Half, kColumns>& memory) {
  const ForwardTask task = task_of<kColumns>(params, blockIdx.x);
  const Sequence& sequence = sequence_of(params, task.sequence);
  return DecodeLongHead<Half, kRules, kColumns>(params, task, sequence, memory).run();
}

template <class Half, ForwardRules kRules, int kColumns>
__global__ void __launch_bounds__(32 * kLongWarps, 1)
    decode_long_heads(const __grid_constant__ ForwardParams<float> params) {
  using Memory = LongHeadMemory<Half, kColumns>;
  extern __shared__ __align__(128) unsigned char shared[];
  wait_for_kernel_before();
  const bool is_finite = decode_segment<Half, kRules>(params, *reinterpret_cast<Memory*>(shared));
  using Careful = ForwardTile<Half, 1, true, kRules>;
  constexpr int kCarefulBytes = sizeof(typename Careful::Memory) + 2 * Careful::Memory::kQueryBytes;
  static_assert(kCarefulBytes + sizeof(ForwardTask) <= sizeof(Memory));
  static_assert(16 * kLongWarps == kTileColumns);
  if (__syncthreads_or(!is_finite) && threadIdx.x < 32) {
    // In shared memory, because there are no registers left for it.
    auto& task = *reinterpret_cast<ForwardTask*>(shared + kCarefulBytes);
    if (threadIdx.x == 0) task = task_of<kColumns>(params, fresh(blockIdx.x));
    __syncwarp();
#pragma unroll 1
    do {
      Careful(params, task, sequence_of(params, task.sequence),
              *reinterpret_cast<typename Careful::Memory*>(shared))
          .run();
      __syncwarp();
      if (threadIdx.x == 0) ++task.value_chunk;
      __syncwarp();
    } while (kColumns == 32 && task.value_chunk * kTileColumns < params.call.value_dim);
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
  const std::int64_t tasks = call.num_sequences * call.num_kv_heads * segments;
  if (params.segment_size.log2_blocks != long_segments().log2_blocks || params.folded != 1 ||
      call.rules.dropout || call.kv_layout.k_scales != nullptr ||
      params.partials.segments > segments || call.max_query_len * call.group > 16 ||
      !params.aligned_q || !params.aligned_k || !params.aligned_v || !fits_32_bits(call) ||
      tasks >= std::int64_t{1} << 30) {
    return false;
  }
  params.row_tiles = 1;
  params.value_chunks = ceil_div(call.value_dim, kTileColumns);
  const bool is_cut =
      params.value_chunks == 1 || tasks * params.value_chunks <= queue.num_multiprocessors();
  const std::int64_t blocks = is_cut ? tasks * params.value_chunks : tasks;
  const auto launch = [&](auto kernel) {
    queue.launch(kernel,
                 {.blocks = dim3(static_cast<unsigned>(blocks)),
                  .threads = dim3(32 * kLongWarps),
                  .shared_bytes = sizeof(LongHeadMemory<__half, 32>),
                  .starts_early = true},
                 params);
  };
  const auto launch_with = [&]<ForwardRules kRules>(auto element) {
    using Half = decltype(element);
    is_cut ? launch(decode_long_heads<Half, kRules, 16>)
           : launch(decode_long_heads<Half, kRules, 32>);
  };
  const auto launch_for = [&](auto element) {
    rules == ForwardRules::kWindow ? launch_with.template operator()<ForwardRules::kWindow>(element)
                                   : launch_with.template operator()<ForwardRules::kAll>(element);
  };
  call.q.dtype == DType::kF16 ? launch_for(__half{}) : launch_for(__nv_bfloat16{});
  if (is_split) fold_partials(queue, params, 1);
  return true;
}

}  // namespace ladon::cuda::hopper
