// dq from the sums that Hopper's backward kernel has left in global memory.
#pragma once

#include "cuda/hopper/backward_store.cuh"
#include "cuda/hopper/backward_tile.cuh"

namespace ladon::cuda::hopper {

/// What a thread has of dq.
template <int kGroups>
struct DqFragment {
  float sums[kGroups][4];

  __device__ float factor(int /*half*/) const { return 1.0F; }
};

/// A block writes a tile of rows of a head: each thread what it would have summed.
template <class Half, class Shape>
__global__ void __launch_bounds__(kBlockTiles* kGroupThreads)
    finish_dq(const __grid_constant__ HopperBackwardParams params) {
  using Memory = BackwardMemory<Shape>;
  const BackwardParams& backward = params.backward;
  const AttentionParams& call = backward.call;
  const auto row_tiles = static_cast<unsigned>(backward.num_row_tiles);
  const std::int64_t head = blockIdx.x / row_tiles;
  const std::int64_t row_tile = blockIdx.x % row_tiles;
  const std::int64_t index =
      backward::sequence_of(backward.row_tile_starts, call.num_sequences, row_tile);
  const Sequence& sequence = call.sequences[index];
  const std::int64_t tile = row_tile - backward.row_tile_starts[index];
  const TileRange keys = backward::key_tiles_seen(call.rules, sequence, tile);
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  const auto* const sums = reinterpret_cast<const float4*>(params.dq_sums) +
                           std::int64_t{blockIdx.x} * (kTile * Shape::kHeadColumns / 4) +
                           group * Memory::kDqGroups * kGroupThreads + threadIdx.x % kGroupThreads;
  DqFragment<Memory::kDqGroups> dq;
#pragma unroll
  for (int n = 0; n < Memory::kDqGroups; ++n) {
    const float4 sum = keys.begin == keys.end ? make_float4(0, 0, 0, 0) : sums[n * kGroupThreads];
    dq.sums[n][0] = sum.x;
    dq.sums[n][1] = sum.y;
    dq.sums[n][2] = sum.z;
    dq.sums[n][3] = sum.w;
  }
  const Operand& to = call.dq;
  const std::int64_t first_token = tile * kTile;
  const int first_column = group * Memory::kDqColumns;
  const std::int64_t start =
      sequence.dq + head * to.head_stride + first_token * to.token_stride + first_column;
  const std::int64_t num_rows = sequence.query_len - first_token;
  const int dim = static_cast<int>(call.head_dim) - first_column;
  store_rows<Half>(dq, params.scale, to, start, num_rows, dim);
}

}  // namespace ladon::cuda::hopper
