// Tiles of long heads that a faster kernel has left, because they have infinities or NaN.

#include "cuda/kernels/forward_finish.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {
namespace {

struct FinishParams {
  ForwardParams<float> forward;
  int parts;
};

template <class Half>
using FinishTile = ForwardTile<Half, kMmaRows / 16, true, ForwardRules::kWindow>;

/// Few blocks of threads for all tiles: there are none, mostly.
template <class Half>
__global__ void __launch_bounds__(32 * kMmaRows / 16)
    finish_streamed(const __grid_constant__ FinishParams params) {
  extern __shared__ __align__(128) unsigned char shared[];
  const ForwardParams<float>& forward = params.forward;
  const std::int64_t row_tiles = forward.row_tiles;
  const std::int64_t tiles = forward.call.num_sequences * forward.call.num_kv_heads * row_tiles;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const std::int64_t place = tile / row_tiles;
    const int* const flags = forward.unfinished + place * params.parts * row_tiles;
    bool is_unfinished = false;
    for (int part = 0; part < params.parts; ++part) {
      is_unfinished = is_unfinished || flags[part * row_tiles + tile % row_tiles] != 0;
    }
    if (!is_unfinished) continue;
    for (std::int64_t chunk = 0; chunk < forward.value_chunks; ++chunk) {
      // Blocks of threads are numbered as tasks are: the last row tile first.
      const ForwardTask task(
          forward, static_cast<unsigned>((place * forward.value_chunks + chunk) * row_tiles +
                                         tile % row_tiles));
      FinishTile<Half>(forward, task, forward.call.sequences[task.sequence],
                       *reinterpret_cast<typename FinishTile<Half>::Memory*>(shared))
          .run();
      __syncthreads();
    }
  }
}

template <class Half>
void finish_tiles(Queue& queue, const ForwardParams<float>& params, int parts) {
  using Memory = typename FinishTile<Half>::Memory;
  const std::int64_t query_tiles = (params.call.head_dim + kTileColumns - 1) / kTileColumns;
  queue.launch(finish_streamed<Half>,
               {dim3(static_cast<unsigned>(queue.num_multiprocessors())), dim3(2 * kMmaRows),
                sizeof(Memory) + static_cast<std::size_t>(query_tiles * Memory::kQueryBytes)},
               FinishParams{params, parts});
}

}  // namespace

void finish_streamed_bf16(Queue& queue, const ForwardParams<float>& params, int parts) {
  finish_tiles<__nv_bfloat16>(queue, params, parts);
}
void finish_streamed_f16(Queue& queue, const ForwardParams<float>& params, int parts) {
  finish_tiles<__half>(queue, params, parts);
}

}  // namespace ladon::cuda
