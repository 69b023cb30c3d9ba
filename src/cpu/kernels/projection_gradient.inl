// Gradients of projections: dx += dy W, dw += dy^T x, db += sum of dy.
//
// Broadcast products (gemm.inl) of blocks of kProjectionTile by kProjectionTile, over
// kProjectionDepth terms at a time. Operands of the compute type are read in place. The order of a
// sum depends on the sizes it runs over alone: a row of dx has the same bits whatever the other
// rows are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/projection_params.h"
#include "cpu/kernel_table.h"
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/gemm.inl"

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kProjectionDepth = 256;  // terms summed between two additions to C

/// Rows and columns of a matrix in the compute type: in place where possible, else staged and
/// padded with zeros to staging.dim.
template <class Scalar>
inline RowBlock<const Scalar> load_rows(const Matrix& matrix, RowRange rows, ElementRange columns,
                                        Staging<Scalar> staging) {
  const std::int64_t first = rows.begin * matrix.stride + columns.begin;
  return load_block(Matrix{at(matrix.data, matrix.dtype, first), matrix.dtype, matrix.stride},
                    rows.end - rows.begin, columns.end - columns.begin, staging);
}

/// Buffers of both gradients.
template <class V>
struct ProjectGradientScratch {
  using Scalar = typename V::Scalar;
  Scalar* sums;  // [kProjectionTile][kProjectionTile]
  Scalar* a;     // a block of dy: [kProjectionTile][kProjectionDepth] or transposed
  Scalar* b;     // [kProjectionDepth][kProjectionTile]
  std::size_t bytes;

  explicit ProjectGradientScratch(Scratch base) {
    ScratchArena arena(base);
    sums = arena.take<Scalar>(kProjectionTile * kProjectionTile);
    a = arena.take<Scalar>(kProjectionTile * kProjectionDepth);
    b = arena.take<Scalar>(kProjectionTile * kProjectionDepth);
    bytes = arena.used();
  }
};

/// Adds the block's sums to rows [row, ...), columns [column, ...) of a gradient.
template <class Scalar>
inline void add_sums(const Matrix& to, std::int64_t row, std::int64_t rows, std::int64_t column,
                     std::int64_t columns, const Scalar* sums) {
  for (std::int64_t r = 0; r < rows; ++r) {
    Scalar* line = static_cast<Scalar*>(to.data) + (row + r) * to.stride + column;
    for (std::int64_t i = 0; i < columns; ++i) line[i] += sums[r * kProjectionTile + i];
  }
}

/// dx of one block: rows of x, columns of in_features.
template <class V>
void project_input_gradient(const ProjectionParams& params, const ProjectionTask& task,
                            Scratch memory) {
  using Scalar = typename V::Scalar;
  const ProjectGradientScratch<V> scratch(memory);
  const std::int64_t rows = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  const std::int64_t width = round_up(columns, V::kLanes);
  for (std::int64_t n = 0; n < params.out_features; n += kProjectionDepth) {
    const std::int64_t end = smaller(n + kProjectionDepth, params.out_features);
    const RowBlock<const Scalar> dy = load_rows(params.y, {task.row_begin, task.row_end}, {n, end},
                                                Staging<Scalar>{scratch.a, end - n});
    const RowBlock<const Scalar> w =
        load_rows(params.w, {n, end}, {task.column_begin, task.column_end},
                  Staging<Scalar>{scratch.b, width});
    gemm<V, Layout::kRows>({.rows = rows, .width = width, .depth = end - n}, dy, w,
                           {.data = scratch.sums, .stride = kProjectionTile, .accumulate = n > 0});
  }
  add_sums(params.dx, task.row_begin, rows, task.column_begin, columns, scratch.sums);
}

template <class V>
std::size_t project_input_gradient_scratch(const ProjectionParams&) {
  return ProjectGradientScratch<V>({}).bytes;
}

/// dw of one block: rows of out_features, columns of in_features. The task that owns column 0 also
/// sums db.
template <class V>
void project_weight_gradient(const ProjectionParams& params, const ProjectionTask& task,
                             Scratch memory) {
  using Scalar = typename V::Scalar;
  const ProjectGradientScratch<V> scratch(memory);
  const std::int64_t outs = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  const std::int64_t width = round_up(columns, V::kLanes);
  const bool sums_bias = params.db.data != nullptr && task.column_begin == 0;
  Scalar bias[kProjectionTile] = {};
  for (std::int64_t row = 0; row < params.rows; row += kProjectionDepth) {
    const std::int64_t end = smaller(row + kProjectionDepth, params.rows);
    const RowBlock<const Scalar> dy = load_rows(
        params.y, {row, end}, {task.row_begin, task.row_end}, Staging<Scalar>{scratch.a, outs});
    const RowBlock<const Scalar> x =
        load_rows(params.x, {row, end}, {task.column_begin, task.column_end},
                  Staging<Scalar>{scratch.b, width});
    gemm<V, Layout::kColumns>(
        {.rows = outs, .width = width, .depth = end - row}, dy, x,
        {.data = scratch.sums, .stride = kProjectionTile, .accumulate = row > 0});
    if (!sums_bias) continue;
    for (std::int64_t r = 0; r < end - row; ++r) {
      for (std::int64_t n = 0; n < outs; ++n) bias[n] += *dy.at(r, n);
    }
  }
  if (params.rows == 0) return;
  add_sums(params.dw, task.row_begin, outs, task.column_begin, columns, scratch.sums);
  if (!sums_bias) return;
  Scalar* db = static_cast<Scalar*>(params.db.data) + task.row_begin;
  for (std::int64_t n = 0; n < outs; ++n) db[n] += bias[n];
}

template <class V>
std::size_t project_weight_gradient_scratch(const ProjectionParams&) {
  return ProjectGradientScratch<V>({}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
