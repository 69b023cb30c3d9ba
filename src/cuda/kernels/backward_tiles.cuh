// Tiles of 16-bit rows in shared memory, and their products: the backward pass.
//
// A tile is [64][kDim] with rows of kDim / 8 chunks of 16 bytes. Chunk c of row r is stored at
// place c ^ (r % 8): the 8 rows that one ldmatrix phase reads, and the chunks that a warp writes,
// are then in different banks.
//
// Fragments are as tensor_core.cuh says.
#pragma once

#include <cstdint>

#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::backward {

inline constexpr int kTileRows = 64;
// Other rows whose scores are in registers at once. All 64 would leave too few for the rest.
inline constexpr int kScoreRows = 32;
inline constexpr int kMmaThreads = 128;

template <int kColumns>
struct TileShape {
  static constexpr int kDim = kColumns;
  static constexpr std::uint32_t kPitch = kDim * 2;  // bytes of a row
  static constexpr std::uint32_t kBytes = kTileRows * kPitch;
};

/// The byte of a chunk within its tile.
template <int kDim>
__device__ inline std::uint32_t chunk_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row) * TileShape<kDim>::kPitch +
         (static_cast<std::uint32_t>(chunk ^ (row % 8)) << 4);
}

/// 2 i chunks to the right of an offset whose own chunk is one of the first two. The permutation
/// stays within 8 chunks.
__device__ inline std::uint32_t chunks_right(std::uint32_t offset, int i) {
  return (offset ^ static_cast<std::uint32_t>(i % 4 << 5)) +
         static_cast<std::uint32_t>(i / 4 * 128);
}

/// Where a lane's row of a fragment is, within 16 rows by 16 columns: chunks further right by
/// chunks_right(), rows further down at `offset + rows * pitch` where rows % 8 == 0.
template <int kDim>
struct LaneOffsets {
  // A by rows, and B transposed: matrices (rows 0-7, chunk 0), (8-15, 0), (0-7, 1), (8-15, 1).
  std::uint32_t down;
  // B by rows: matrices (rows 0-7, chunk 0), (0-7, 1), (8-15, 0), (8-15, 1).
  std::uint32_t right;

  __device__ explicit LaneOffsets(int lane)
      : down(chunk_offset<kDim>(lane % 16, lane / 16)),
        right(chunk_offset<kDim>(lane % 8 + lane / 16 * 8, lane / 8 % 2)) {}

  /// A copy that the compiler takes for new: it would otherwise keep the offsets of all chunks from
  /// one product to the next, in registers that are needed elsewhere.
  __device__ LaneOffsets fresh() const {
    LaneOffsets copy = *this;
    asm volatile("" : "+r"(copy.down), "+r"(copy.right));
    return copy;
  }
};

/// Starts to load columns [kFirst, kFirst + 8 kChunks) of 64 rows, by the block's kThreads threads.
/// Rows without their bit in `live`, and columns past `dim`, become 0 and are not read.
template <class T, int kDim, int kThreads, int kChunks, int kFirst>
__device__ inline void load_columns(const T* rows, std::int64_t stride, int dim, bool aligned,
                                    std::uint64_t live, std::uint32_t tile) {
  constexpr int kRowsAtOnce = kThreads / kChunks;
  static_assert(kRowsAtOnce % 8 == 0 && kTileRows % kRowsAtOnce == 0);
  const int chunk = kFirst / 8 + static_cast<int>(threadIdx.x) % kChunks;
  const int first_row = static_cast<int>(threadIdx.x) / kChunks;
  const int left = dim - 8 * chunk;
  const int elements = left < 0 ? 0 : left > 8 ? 8 : left;
  const T* from = rows + first_row * stride + 8 * chunk;
  const std::uint32_t to = tile + chunk_offset<kDim>(first_row, chunk);
  const auto count_of = [&](int i) {
    return (live >> (first_row + i * kRowsAtOnce) & 1) != 0 ? elements : 0;
  };
  if (aligned) {
#pragma unroll
    for (int i = 0; i < kTileRows / kRowsAtOnce; ++i, from += kRowsAtOnce * stride) {
      const int count = count_of(i);
      copy_async_16(to + i * kRowsAtOnce * TileShape<kDim>::kPitch, count == 0 ? rows : from,
                    count * 2);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kTileRows / kRowsAtOnce; ++i, from += kRowsAtOnce * stride) {
    const int count = count_of(i);
    const auto* const bits = reinterpret_cast<const std::uint16_t*>(from);
    std::uint32_t words[4];
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      const std::uint32_t low = 2 * word < count ? bits[2 * word] : 0;
      const std::uint32_t high = 2 * word + 1 < count ? bits[2 * word + 1] : 0;
      words[word] = low | high << 16;
    }
    store_16(to + i * kRowsAtOnce * TileShape<kDim>::kPitch, words[0], words[1], words[2],
             words[3]);
  }
}

/// The same for all kDim columns.
template <class T, int kDim, int kThreads>
__device__ inline void load_tile(const T* rows, std::int64_t stride, int dim, bool aligned,
                                 std::uint64_t live, std::uint32_t tile) {
  if constexpr (kDim <= 128) {
    load_columns<T, kDim, kThreads, kDim / 8, 0>(rows, stride, dim, aligned, live, tile);
  } else {
    load_columns<T, kDim, kThreads, 16, 0>(rows, stride, dim, aligned, live, tile);
    load_columns<T, kDim, kThreads, (kDim - 128) / 8, 128>(rows, stride, dim, aligned, live, tile);
  }
}

/// Where a tile of an operand begins, in a sequence that begins at element `offset`.
struct FirstRow {
  std::int64_t offset = 0;
  std::int64_t head = 0;
  std::int64_t token = 0;
};

/// Scores of 16 own rows with kScoreRows other rows.
using ScoreFragment = float[kScoreRows / 8][4];

/// c[16 x kScoreRows] = A[16 x kDim] B^T, both by rows: the dot products of their rows.
template <class T, int kDim>
__device__ inline void dot_product_tile(std::uint32_t a_rows, std::uint32_t b_first,
                                        const LaneOffsets<kDim>& lane_of_block, ScoreFragment& c) {
  const LaneOffsets<kDim> lane = lane_of_block.fresh();
#pragma unroll
  for (int n = 0; n < kScoreRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) c[n][i] = 0;
  }
#pragma unroll
  for (int k = 0; k < kDim / 16; ++k) {
    std::uint32_t a[4];
    load_matrices(a, a_rows + chunks_right(lane.down, k));
    const std::uint32_t b_rows = b_first + chunks_right(lane.right, k);
#pragma unroll
    for (int n = 0; n < kScoreRows / 16; ++n) {
      std::uint32_t b[4];
      load_matrices(b, b_rows + n * 16 * TileShape<kDim>::kPitch);
      multiply_add<T>(c[2 * n], a, b[0], b[1]);
      multiply_add<T>(c[2 * n + 1], a, b[2], b[3]);
    }
  }
}

/// c[16 x 8 kGroups] += A[16 x kScoreRows] B, with A in registers and B columns from kFirst on of
/// rows of a tile.
template <class T, int kFirst, int kDim, int kGroups>
__device__ inline void add_product_tile(const std::uint32_t (&a)[kScoreRows / 16][4],
                                        std::uint32_t b_rows, const LaneOffsets<kDim>& lane,
                                        float (&c)[kGroups][4]) {
#pragma unroll
  for (int k = 0; k < kScoreRows / 16; ++k) {
#pragma unroll
    for (int n = 0; n < kGroups / 2; ++n) {
      std::uint32_t b[4];
      load_matrices_transposed(
          b, b_rows + k * 16 * TileShape<kDim>::kPitch + chunks_right(lane.down, kFirst / 16 + n));
      multiply_add<T>(c[2 * n], a[k], b[0], b[1]);
      multiply_add<T>(c[2 * n + 1], a[k], b[2], b[3]);
    }
  }
}

}  // namespace ladon::cuda::backward
