// Tiles of the forward pass that a faster kernel has left, because they have infinities or NaN.
#pragma once

#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {

/// Few blocks of threads for all tiles: there are none, mostly.
template <class Half, bool kStreamed, ForwardRules kRules>
__global__ void __launch_bounds__(32 * kMmaRows / 16)
    finish_forward(const __grid_constant__ ForwardParams<float> params) {
  using Tile = ForwardTile<Half, kMmaRows / 16, kStreamed, kRules>;
  extern __shared__ __align__(128) unsigned char shared[];
  if (params.unfinished[0] == 0) return;
  const std::int64_t tiles =
      params.call.num_sequences * params.call.num_kv_heads * params.row_tiles;
  for (std::int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    if (params.unfinished[1 + tile] == 0) continue;
    ForwardTask task(params, static_cast<unsigned>(tile));
    task.row_tile = tile % params.row_tiles;
    for (; task.value_chunk * kTileColumns < params.call.value_dim; ++task.value_chunk) {
      Tile(params, task, params.call.sequences[task.sequence],
           *reinterpret_cast<typename Tile::Memory*>(shared))
          .run();
      __syncthreads();
    }
  }
}

template <class Half, bool kStreamed, ForwardRules kRules>
void finish_tiles(Queue& queue, const ForwardParams<float>& params) {
  constexpr int kWarps = kMmaRows / 16;
  using Memory = ForwardMemory<Half, kWarps, kStreamed, kRules, false>;
  const std::int64_t query_tiles =
      kStreamed ? (params.call.head_dim + kTileColumns - 1) / kTileColumns : 0;
  queue.launch(finish_forward<Half, kStreamed, kRules>,
               {dim3(static_cast<unsigned>(queue.num_multiprocessors())), dim3(32 * kWarps),
                sizeof(Memory) + static_cast<std::size_t>(query_tiles * Memory::kQueryBytes)},
               params);
}

}  // namespace ladon::cuda
