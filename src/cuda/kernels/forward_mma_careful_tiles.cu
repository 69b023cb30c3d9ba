// Tiles of the forward pass that a faster kernel has left, because they have infinities or NaN.

#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {
namespace {

/// Few blocks of threads for all tiles: there are none, mostly.
template <class Half>
__global__ void __launch_bounds__(32 * kMmaRows / 16)
    finish_forward(const __grid_constant__ ForwardParams<float> params) {
  using Tile = ForwardTile<Half, kMmaRows / 16, false, ForwardRules::kWindow>;
  extern __shared__ __align__(128) unsigned char shared[];
  if (params.unfinished[0] == 0) return;
  const std::int64_t tiles =
      params.call.num_sequences * params.call.num_kv_heads * params.row_tiles;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (params.unfinished[1 + tile] == 0) continue;
    ForwardTask task(params, tile);
    task.row_tile = tile % params.row_tiles;
    Tile(params, task, params.call.sequences[task.sequence],
         *reinterpret_cast<typename Tile::Memory*>(shared))
        .run();
    __syncthreads();
  }
}

template <class Half>
void finish_tiles(Queue& queue, const ForwardParams<float>& params) {
  constexpr int kWarps = kMmaRows / 16;
  queue.launch(finish_forward<Half>,
               {dim3(static_cast<unsigned>(queue.num_multiprocessors())), dim3(32 * kWarps),
                sizeof(ForwardMemory<Half, kWarps, false, ForwardRules::kWindow, false>)},
               params);
}

}  // namespace

void finish_forward_bf16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__nv_bfloat16>(queue, params);
}
void finish_forward_f16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__half>(queue, params);
}

}  // namespace ladon::cuda
