// Projections and their gradients: y = x W^T + b, dx += dy W, dw += dy^T x, db += sum of dy.
//
// W is read as checkpoints store it, [out_features, in_features]: y takes dot products of rows, dx
// and dw take broadcast products (gemm.inl), so nothing is packed. Every sum has one order that
// depends on the sizes it runs over alone: a row of y or dx has the same bits whatever rows are
// beside it. Blocks of kProjectionTile rows of x stay in L2 while W passes; for one row the bound
// is reading W once. Measured (Zen 4, docs/projections.md): 75 to 85 % of FMA for many rows of f32,
// 90 % of the memory read for one.
// Tried and lost: the broadcast product with x turned and W as it lies, or W turned in registers
// and x as it lies, both with sums over the terms in turn, which are the same bits for any number
// of rows: 10 to 20 % faster for 64 rows and more of f32, not for bf16, and half as fast for one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/projection_params.h"
#include "cpu/kernel_table.h"
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/dot.inl"
#include "cpu/kernels/gemm.inl"

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kProjectionDepth = 256;  // terms summed between two additions to C

/// Rows [begin, end), columns [column, column + dim) of a matrix in the compute type; as they lie
/// where they can be, else staged and filled up with zeros to `padded_dim`.
template <class Scalar>
inline Block<Scalar> load_rows(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                               std::int64_t column, std::int64_t dim, std::int64_t padded_dim,
                               Scalar* staging) {
  const Operand operand{matrix.data, matrix.dtype, matrix.stride, 0};
  return load_block(operand, column, 0, begin, end, dim, padded_dim, staging);
}

template <class V>
struct ProjectScratch {
  using Scalar = typename V::Scalar;
  std::int64_t in_features;  // padded to whole vectors
  Scalar* x;                 // [kProjectionTile][in_features]
  Scalar* w;                 // [kDotKeys][in_features]
  Scalar* y;                 // [kProjectionTile][kProjectionTile]
  std::size_t bytes;

  ProjectScratch(const ProjectionParams& params, void* base) {
    ScratchArena arena(base);
    in_features = round_up(params.in_features, V::kLanes);
    x = arena.take<Scalar>(kProjectionTile * in_features);
    w = arena.take<Scalar>(kDotKeys * in_features);
    y = arena.take<Scalar>(kProjectionTile * kProjectionTile);
    bytes = arena.used();
  }
};

/// A block [row][stride] of products, plus the bias, to y.
template <class Scalar>
inline void write_block(const ProjectionParams& params, const ProjectionTask& task,
                        Scalar* products, std::int64_t stride) {
  const std::int64_t rows = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  Scalar bias[kProjectionTile] = {};
  if (params.b.data != nullptr) {
    load_row(at(params.b.data, params.b.dtype, task.column_begin), params.b.dtype, columns, bias);
  }
  for (std::int64_t r = 0; r < rows; ++r) {
    Scalar* y = products + r * stride;
    if (params.b.data != nullptr) {
      for (std::int64_t n = 0; n < columns; ++n) y[n] += bias[n];
    }
    store_row(y, columns,
              at(params.y.data, params.y.dtype,
                 (task.row_begin + r) * params.y.stride + task.column_begin),
              params.y.dtype);
  }
}

/// y of one block of rows and columns.
template <class V>
void project(const ProjectionParams& params, const ProjectionTask& task, void* memory) {
  using Scalar = typename V::Scalar;
  const ProjectScratch<V> scratch(params, memory);
  const std::int64_t rows = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  const Block<Scalar> x = load_rows(params.x, task.row_begin, task.row_end, 0, params.in_features,
                                    scratch.in_features, scratch.x);
  // Few rows take weights as they are stored; many share weights that are widened once.
  const bool as_stored = rows <= kDotRows<V> && loads_stored<V>(params.w.dtype);
  for (std::int64_t n = 0; n < columns; n += kDotKeys) {
    const std::int64_t first = task.column_begin + n;
    const std::int64_t count = smaller(kDotKeys, columns - n);
    const char* lines[kDotKeys];
    const auto product = [&](auto stored) {
      dot_products<V, decltype(stored)::kDType>(rows, 0, count, params.in_features, x.data,
                                                x.stride, StoredRows{lines, 0}, scratch.y + n,
                                                kProjectionTile);
    };
    if (as_stored) {
      for (std::int64_t i = 0; i < count; ++i) {
        lines[i] = static_cast<const char*>(
            at(params.w.data, params.w.dtype, (first + i) * params.w.stride));
      }
      with_stored<V>(params.w.dtype, product);
      continue;
    }
    const Block<Scalar> w = load_rows(params.w, first, first + count, 0, params.in_features,
                                      params.in_features, scratch.w);
    for (std::int64_t i = 0; i < count; ++i) {
      lines[i] = reinterpret_cast<const char*>(w.data + i * w.stride);
    }
    product(StoredAs<kDTypeOf<Scalar>>{});
  }
  write_block(params, task, scratch.y, kProjectionTile);
}

template <class V>
std::size_t project_scratch(const ProjectionParams& params) {
  return ProjectScratch<V>(params, nullptr).bytes;
}

/// Blocks of the two gradients: C [kProjectionTile][kProjectionTile] summed over `depth`.
template <class V>
struct ProjectGradientScratch {
  using Scalar = typename V::Scalar;
  Scalar* sums;  // [kProjectionTile][kProjectionTile]
  Scalar* a;     // a block of dy, either way up
  Scalar* b;     // [kProjectionDepth][kProjectionTile]
  std::size_t bytes;

  explicit ProjectGradientScratch(void* base) {
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
                            void* memory) {
  using Scalar = typename V::Scalar;
  const ProjectGradientScratch<V> scratch(memory);
  const std::int64_t rows = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  const std::int64_t width = round_up(columns, V::kLanes);
  for (std::int64_t n = 0; n < params.out_features; n += kProjectionDepth) {
    const std::int64_t end = smaller(n + kProjectionDepth, params.out_features);
    const Block<Scalar> dy =
        load_rows(params.y, task.row_begin, task.row_end, n, end - n, end - n, scratch.a);
    const Block<Scalar> w =
        load_rows(params.w, n, end, task.column_begin, columns, width, scratch.b);
    gemm<V, Layout::kRows>(rows, width, end - n, dy.data, dy.stride, w.data, w.stride, scratch.sums,
                           kProjectionTile, n > 0);
  }
  add_sums(params.dx, task.row_begin, rows, task.column_begin, columns, scratch.sums);
}

template <class V>
std::size_t project_input_gradient_scratch(const ProjectionParams&) {
  return ProjectGradientScratch<V>(nullptr).bytes;
}

/// dw of one block: rows of out_features, columns of in_features. The task that owns column 0 also
/// sums db.
template <class V>
void project_weight_gradient(const ProjectionParams& params, const ProjectionTask& task,
                             void* memory) {
  using Scalar = typename V::Scalar;
  const ProjectGradientScratch<V> scratch(memory);
  const std::int64_t outs = task.row_end - task.row_begin;
  const std::int64_t columns = task.column_end - task.column_begin;
  const std::int64_t width = round_up(columns, V::kLanes);
  const bool sums_bias = params.db.data != nullptr && task.column_begin == 0;
  Scalar bias[kProjectionTile] = {};
  for (std::int64_t row = 0; row < params.rows; row += kProjectionDepth) {
    const std::int64_t end = smaller(row + kProjectionDepth, params.rows);
    const Block<Scalar> dy = load_rows(params.y, row, end, task.row_begin, outs, outs, scratch.a);
    const Block<Scalar> x =
        load_rows(params.x, row, end, task.column_begin, columns, width, scratch.b);
    gemm<V, Layout::kColumns>(outs, width, end - row, dy.data, dy.stride, x.data, x.stride,
                              scratch.sums, kProjectionTile, row > 0);
    if (!sums_bias) continue;
    for (std::int64_t r = 0; r < end - row; ++r) {
      for (std::int64_t n = 0; n < outs; ++n) bias[n] += dy.data[r * dy.stride + n];
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
  return ProjectGradientScratch<V>(nullptr).bytes;
}

}  // namespace
}  // namespace ladon::cpu
