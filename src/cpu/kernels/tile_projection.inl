// Projections of bf16 rows by bf16 weights on AMX: y^T = W x^T.
//
// W's rows are loaded as tiles in place, so weights need no packing, for one row as for a thousand.
// x is transposed to pairs, [pair of terms][row]: about 120 cycles for 16 x 16 of them, compared
// with 16 cycles for each 16 rows of W that are multiplied with them, so blocks have many columns.
// Few rows take W from end to end; many rows take it in parts, so that a part of x^T stays in the
// near caches. The order of a sum is AMX's and depends on the number of terms alone. Not measured
// on a machine with AMX yet; tested on an emulated one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/projection.inl"
#include "cpu/kernels/tile_engine.inl"

namespace ladon::cpu {
namespace {

// Columns of a block.
inline constexpr std::int64_t kTileColumns = 1024;

class TileProjection {
 public:
  TileProjection(const ProjectionParams& params, Scratch memory) : params_(params) {
    ScratchArena arena(memory);
    const std::int64_t terms = params.rows <= kTileSide ? params.in_features : kPart;
    part_ = larger(round_up(terms, 2 * kTileSide), 2 * kTileSide);
    rows_ = arena.take<Pair>(part_ / 2 * kProjectionTile);
    weights_ = arena.take<Pair>(kWeightRows * part_ / 2);
    products_ = arena.take<float>(kTileColumns * kProjectionTile);
    lines_ = arena.take<float>(kTileSide * kTileColumns);
    bytes_ = arena.used();
  }
  std::size_t bytes() const { return bytes_; }

  void run(const ProjectionTask& task) {
    engine_.begin();
    const std::int64_t width = round_up(task.row_end - task.row_begin, kTileSide);
    std::int64_t begin = 0;
    do {  // runs once for no terms too: y is then the bias
      const std::int64_t end = smaller(begin + part_, params_.in_features);
      const std::int64_t depth = round_up(pairs_in(end - begin), kTileSide);
      pair_along_rows(
          [&](std::int64_t r) {
            return task.row_begin + r < task.row_end ? row_of(params_.x, task.row_begin + r) + begin
                                                     : nullptr;
          },
          width, end - begin, depth, rows_);
      for (std::int64_t n = task.column_begin; n < task.column_end; n += kWeightRows) {
        const std::int64_t count = smaller(kWeightRows, task.column_end - n);
        tile_gemm({.rows = round_up(count, kTileSide), .width = width, .depth = depth},
                  weights(n, count, begin, end, depth), {rows_, width},
                  {.data = products_ + (n - task.column_begin) * width,
                   .stride = width,
                   .accumulate = begin > 0});
      }
      begin = end;
    } while (begin < params_.in_features);
    write(task, width);
  }

 private:
  static constexpr std::int64_t kPart = 512;                  // terms of a part
  static constexpr std::int64_t kWeightRows = 2 * kTileSide;  // multiplied at a time

  static const std::uint16_t* row_of(const Matrix& matrix, std::int64_t row) {
    return static_cast<const std::uint16_t*>(matrix.data) + row * matrix.stride;
  }

  /// Rows of W: in place where they are whole tiles of whole pairs, else copied and padded with
  /// zeros.
  PairMatrix weights(std::int64_t column, std::int64_t count, std::int64_t begin, std::int64_t end,
                     std::int64_t depth) const {
    const std::uint16_t* first = row_of(params_.w, column) + begin;
    if (end - begin == 2 * depth && count % kTileSide == 0 && params_.w.stride % 2 == 0 &&
        reinterpret_cast<std::uintptr_t>(first) % sizeof(Pair) == 0) {
      return {reinterpret_cast<const Pair*>(first), params_.w.stride / 2};
    }
    copy_as_pairs(
        round_up(count, kTileSide), end - begin, depth,
        [&](std::int64_t row) { return row < count ? first + row * params_.w.stride : nullptr; },
        weights_);
    return {weights_, depth};
  }

  /// Stores the products, [column][width], plus the bias, to y: 16 rows at a time.
  void write(const ProjectionTask& task, std::int64_t width) {
    const std::int64_t columns = task.column_end - task.column_begin;
    const std::int64_t rows = task.row_end - task.row_begin;
    for (std::int64_t first = 0; first < rows; first += kTileSide) {
      for (std::int64_t n = 0; n < columns; n += kTileSide) {
        transpose_square<F32>([&](int i) { return load<F32>(products_ + (n + i) * width + first); },
                              kTileSide, lines_ + n, kTileColumns);
      }
      ProjectionTask rest = task;
      rest.row_begin = task.row_begin + first;
      rest.row_end = smaller(rest.row_begin + kTileSide, task.row_end);
      for_each_columns(rest, kProjectionTile, [&](const ProjectionTask& part) {
        write_block(params_, part, lines_ + (part.column_begin - task.column_begin), kTileColumns);
      });
    }
  }

  const ProjectionParams& params_;
  TileEngine engine_;
  std::int64_t part_;  // terms of a part
  Pair* rows_;         // [pair of terms][width] of x
  Pair* weights_;      // [kWeightRows][pair of terms], where W is not read in place
  float* products_;    // [kTileColumns][width]
  float* lines_;       // [kTileSide][kTileColumns]
  std::size_t bytes_;
};

/// Projections whose x is bf16. Where the weights are not, x is converted to f32.
inline void project_by_tiles(const ProjectionParams& params, const ProjectionTask& task,
                             Scratch memory) {
  if (params.w.dtype == DType::kBF16) return TileProjection(params, memory).run(task);
  for_each_columns(task, kProjectColumns,
                   [&](const ProjectionTask& part) { project<F32>(params, part, memory); });
}

inline std::size_t project_by_tiles_scratch(const ProjectionParams& params) {
  if (params.w.dtype == DType::kBF16) return TileProjection(params, {}).bytes();
  return project_scratch<F32>(params);
}

}  // namespace
}  // namespace ladon::cpu
