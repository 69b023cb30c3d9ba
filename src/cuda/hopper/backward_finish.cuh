// dq from the sums that Hopper's backward kernel has left in global memory.
#pragma once

#include "cuda/hopper/backward_tile.cuh"
#include "cuda/kernels/backward_fragments.cuh"

namespace ladon::cuda::hopper {

/// Each of the four lanes that share a row has a word of four chunks; lane t gets all words of
/// chunk t.
__device__ inline uint4 gather_chunk(const std::uint32_t (&words)[4]) {
  const unsigned lane = threadIdx.x % 4;
  std::uint32_t chunk[4];
#pragma unroll
  for (unsigned distance = 0; distance < 4; ++distance) {
    const unsigned to = (lane + distance) % 4;
    const unsigned from = (lane - distance) % 4;
    const std::uint32_t sent = to == 0   ? words[0]
                               : to == 1 ? words[1]
                               : to == 2 ? words[2]
                                         : words[3];
    const std::uint32_t got = __shfl_sync(0xffffffffU, sent, static_cast<int>(from), 4);
#pragma unroll
    for (unsigned i = 0; i < 4; ++i) chunk[i] = from == i ? got : chunk[i];
  }
  return make_uint4(chunk[0], chunk[1], chunk[2], chunk[3]);
}

/// What a thread has of dq.
template <int kGroups>
struct DqFragment {
  float sums[kGroups][4];

  __device__ float factor(int /*half*/) const { return 1.0F; }

  /// The same as store_sums() with 16 bytes at a time, to 16-bit rows that are aligned to them.
  template <class Half>
  __device__ void store_chunks(float factor, const Operand& operand, std::int64_t start,
                               std::int64_t num_rows, int dim) const {
    const backward::FragmentPlace place;
    auto* const rows = static_cast<std::uint16_t*>(operand.data) + start;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = place.own(2 * half);
#pragma unroll
      for (int first = 0; first < kGroups; first += 4) {
        std::uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = sums[first + i];
          words[i] = pack<Half>(from[2 * half] * factor, from[2 * half + 1] * factor);
        }
        const uint4 chunk = gather_chunk(words);
        const int column = (first + static_cast<int>(threadIdx.x) % 4) * 8;
        if (row >= num_rows || column >= dim) continue;
        *reinterpret_cast<uint4*>(rows + row * operand.token_stride + column) = chunk;
      }
    }
  }
};

/// A block writes a tile of rows of a head: each thread what it would have summed.
template <class Half, int kColumns>
__global__ void __launch_bounds__(kBlockTiles* kGroupThreads)
    finish_dq(const __grid_constant__ HopperBackwardParams params) {
  using Memory = BackwardMemory<kColumns>;
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
                           std::int64_t{blockIdx.x} * (kTile * kColumns / 4) +
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
  const bool is_aligned =
      to.dtype != DType::kF32 && dim % 8 == 0 && to.token_stride % 8 == 0 &&
      reinterpret_cast<std::uintptr_t>(static_cast<std::uint16_t*>(to.data) + start) % 16 == 0;
  if (is_aligned) {
    dq.template store_chunks<Half>(params.scale, to, start, num_rows, dim);
  } else {
    backward::store_sums<Half>(dq, params.scale, to, start, num_rows, dim);
  }
}

}  // namespace ladon::cuda::hopper
