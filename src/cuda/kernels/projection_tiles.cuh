// Tiles of 16-bit operands in shared memory: how they are copied there, and how tensor cores read
// them.
//
// A tile holds kExtent rows of an operand and kTileK values of k, as lines of contiguous elements:
// a line is a row where k is contiguous in memory, else one k of all rows. The 16-byte chunks of a
// line are permuted by the last three bits of the line's index, so that the eight lines of an 8x8
// matrix are in different banks. What is past the operand's end is 0.
#pragma once

#include <cstdint>

#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::projection {

inline constexpr int kTileK = 64;
inline constexpr int kStepK = 16;  // of one instruction
inline constexpr int kChunkElements = 8;
inline constexpr int kChunkBytes = 16;

template <int kExtent>
inline constexpr int kTileBytes = kExtent* kTileK * 2;

/// 16 bytes that are not aligned: up to `count` elements, and zeros.
__device__ inline void copy_elements(std::uint32_t to, const std::uint16_t* from, int count) {
  std::uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t low = 2 * i < count ? from[2 * i] : 0;
    const std::uint32_t high = 2 * i + 1 < count ? from[2 * i + 1] : 0;
    words[i] = low | high << 16;
  }
  store_16(to, words[0], words[1], words[2], words[3]);
}

/// The byte offset of a chunk in a tile whose lines have kLineChunks of them, 8 or 16.
template <int kLineChunks>
__device__ inline std::uint32_t chunk_offset(int line, int chunk) {
  return static_cast<std::uint32_t>((line * kLineChunks + (chunk ^ (line & 7))) * kChunkBytes);
}

/// Rows of an operand from its first element on, as one block or warp reads them.
struct OperandRows {
  const std::uint16_t* data = nullptr;
  std::int64_t stride = 0;
  std::int64_t rows = 0;   // 1 or more
  std::int64_t depth = 0;  // values of k
  bool vectors = false;    // lines are aligned, and whole chunks long
};

/// Copies the tiles of an operand, from k = 0 on. A thread has the same chunk of every
/// kLinesPerPass-th line.
template <int kExtent, bool kAlongK, int kThreads>
class TileCopy {
 public:
  __device__ TileCopy(const OperandRows& operand, int thread)
      : stride_(operand.stride),
        depth_(static_cast<int>(operand.depth)),
        rows_(static_cast<int>(min(operand.rows, std::int64_t{kExtent}))),
        line_(thread / kLineChunks),
        chunk_(thread % kLineChunks),
        vectors_(operand.vectors) {
    source_ = operand.data + line_ * stride_ + chunk_ * kChunkElements;
  }

  /// Starts the copy of this tile.
  __device__ void start(std::uint32_t to) const {
    // Of this thread's chunk in each line; 0 or less where the chunk is past the line's end.
    const int elements = (kAlongK ? depth_ : rows_) - chunk_ * kChunkElements;
    const int lines = kAlongK ? rows_ : depth_;
    if (vectors_) {
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) {
        const int line = line_ + pass * kLinesPerPass;
        copy_async_line(to + chunk_offset<kLineChunks>(line, chunk_),
                        source_ + pass * kLinesPerPass * stride_, elements > 0 && line < lines);
      }
    } else {
#pragma unroll 1
      for (int pass = 0; pass < kPasses; ++pass) {
        const int line = line_ + pass * kLinesPerPass;
        copy_elements(to + chunk_offset<kLineChunks>(line, chunk_),
                      source_ + pass * kLinesPerPass * stride_, line < lines ? elements : 0);
      }
    }
  }
  /// Goes on by some tiles.
  __device__ void advance(int tiles) {
    source_ += tiles * kTileK * (kAlongK ? 1 : stride_);
    depth_ -= tiles * kTileK;
  }

 private:
  static constexpr int kLines = kAlongK ? kExtent : kTileK;
  static constexpr int kLineChunks = (kAlongK ? kTileK : kExtent) / kChunkElements;
  static constexpr int kLinesPerPass = kThreads / kLineChunks;
  static constexpr int kPasses = kLines / kLinesPerPass;
  static_assert(kPasses * kLinesPerPass == kLines && kLinesPerPass * kLineChunks == kThreads);

  const std::uint16_t* source_;  // this thread's first element of the tile
  std::int64_t stride_;
  int depth_;  // from the tile on
  int rows_;
  int line_;
  int chunk_;
  bool vectors_;
};

/// The line and chunk whose address a lane gives, within the 16 lines and two chunks of four 8x8
/// matrices.
struct MatrixLane {
  int line;
  int chunk;
};
/// Matrices 0 and 1 are lines 0 to 15 of the first chunk, 2 and 3 those of the second.
__device__ inline MatrixLane lines_first(int lane) { return {lane & 15, lane >> 4}; }
/// Matrices 0 and 1 are two chunks of lines 0 to 7, 2 and 3 those of lines 8 to 15.
__device__ inline MatrixLane chunks_first(int lane) {
  return {(lane & 7) | (lane >> 4) << 3, (lane >> 3) & 1};
}

/// Rows [row, row + 16) of a tile at one k step, as the A operand. Its four registers are the
/// matrices (rows 0-7, k 0-7), (rows 8-15, k 0-7), (rows 0-7, k 8-15), (rows 8-15, k 8-15).
template <int kExtent, bool kAlongK>
__device__ inline void load_a(std::uint32_t (&to)[4], std::uint32_t tile, int row, int step,
                              int lane) {
  if constexpr (kAlongK) {
    const MatrixLane at = lines_first(lane);
    load_matrices(to, tile + chunk_offset<kTileK / 8>(row + at.line, 2 * step + at.chunk));
  } else {
    const MatrixLane at = chunks_first(lane);
    load_matrices_transposed(
        to, tile + chunk_offset<kExtent / 8>(kStepK * step + at.line, row / 8 + at.chunk));
  }
}

/// The same rows as two B operands of 8 columns each: registers 0 and 1 are k 0-7 and 8-15 of rows
/// 0-7, registers 2 and 3 those of rows 8-15.
template <int kExtent, bool kAlongK>
__device__ inline void load_b(std::uint32_t (&to)[4], std::uint32_t tile, int row, int step,
                              int lane) {
  if constexpr (kAlongK) {
    const MatrixLane at = chunks_first(lane);
    load_matrices(to, tile + chunk_offset<kTileK / 8>(row + at.line, 2 * step + at.chunk));
  } else {
    const MatrixLane at = lines_first(lane);
    load_matrices_transposed(
        to, tile + chunk_offset<kExtent / 8>(kStepK * step + at.line, row / 8 + at.chunk));
  }
}

/// Rows [0, 8) of a tile along k as the B operands of two steps: registers 0 and 1 are those of
/// `step`, 2 and 3 of the next.
__device__ inline void load_b_of_two_steps(std::uint32_t (&to)[4], std::uint32_t tile, int step,
                                           int lane) {
  load_matrices(to, tile + chunk_offset<kTileK / 8>(lane & 7, 2 * step + (lane >> 3)));
}

}  // namespace ladon::cuda::projection
