// Projections: y = x W^T + b.
//
// W is read in the layout of checkpoints, [out_features, in_features]: dot products of rows, so
// weights are not packed. Products are taken over parts of 2 KiB of a row, which are added up in
// order: the order of a sum depends on in_features alone, and a row has the same bits whatever the
// other rows are. 4 parts of W, in L1, are multiplied with up to 64 of x, copied next to each other
// into L2, while the next 4 rows of W are prefetched. For one row the bound is reading W once.
// Measured (Zen 4, docs/projections.md): f32 of 1024 rows at 73 to 85 % of FMA, of 64 at 64 to 78
// %; one row at 70 to 90 % of the memory read.
//
// Tried and lost: whole rows (72 %: W and x share the sets of L1, and come from L2); parts of 1 and
// of 4 KiB; sums kept as vectors from part to part (as fast, 16 times the scratch); 8 rows of W by
// 3 of x; W copied; prefetching 4 rows of W at once, which stalls the products (8 rows: -13 %);
// prefetching x; broadcast products with x or W transposed (slower, or half as fast for one row).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/projection_params.h"
#include "cpu/kernel_table.h"
#include "cpu/kernels/convert.inl"
#include "cpu/kernels/dot.inl"

namespace ladon::cpu {
namespace {

/// Rows of a projection as elements of the compute type.
template <class V>
struct ElementRows {
  using Sums = V;
  using Factor = typename V::Scalar;
  static constexpr std::int64_t kTerms = 1;  // per factor

  /// Copies some terms of some rows to rows of factors, padded with zeros.
  static void copy(const Matrix& matrix, RowRange rows, ElementRange terms, RowBlock<Factor> to) {
    const std::int64_t count = terms.end - terms.begin;
    for (std::int64_t row = rows.begin; row < rows.end; ++row) {
      Factor* factors = to.row(row - rows.begin);
      load_row(at(matrix.data, matrix.dtype, row * matrix.stride + terms.begin), matrix.dtype,
               count, factors);
      for (std::int64_t i = count; i < to.stride; ++i) factors[i] = 0;
    }
  }
  /// Whether W is read in place. As many rows as fit the registers convert weights as they load
  /// them; more rows share weights that are converted once.
  static bool in_place(const ProjectionParams& params) {
    return params.w.dtype == kDTypeOf<Factor> ||
           (params.rows <= kDotRows && loads_stored<V>(params.w.dtype));
  }
  template <class Body>
  static void with_weights(DType dtype, const Body& body) {
    with_stored<V>(dtype, body);
  }
};

/// Rows of one projection in parts of 2 KiB, whose products are summed part by part: with many
/// rows, four parts of W's rows stay in L1 while those of x, copied next to each other, come from
/// L2. The last part is up to half as long again.
template <class Rows>
struct Parts {
  using Factor = typename Rows::Factor;
  static constexpr std::int64_t kLength = 2048 / std::int64_t{sizeof(Factor)};  // factors
  static constexpr std::int64_t kMost = kLength * 3 / 2;

  std::int64_t in_features;
  std::int64_t depth = (in_features + Rows::kTerms - 1) / Rows::kTerms;  // factors of a row
  std::int64_t count = larger((depth + kLength / 2 - 1) / kLength, 1);

  std::int64_t begin(std::int64_t part) const { return part * kLength; }
  std::int64_t end(std::int64_t part) const { return part + 1 < count ? begin(part + 1) : depth; }
  std::int64_t first_term(std::int64_t part) const { return begin(part) * Rows::kTerms; }
  ElementRange terms(std::int64_t part) const {
    return {first_term(part), smaller(end(part) * Rows::kTerms, in_features)};
  }
  /// The stride of copied rows, in factors.
  std::int64_t stride(std::int64_t part) const {
    return round_up(end(part) - begin(part), Rows::Sums::kLanes);
  }
};

template <class Rows>
struct ProjectScratch {
  using Factor = typename Rows::Factor;
  using Scalar = typename Rows::Sums::Scalar;
  Factor* x;  // [part][row][factor], as many parts as fit
  Factor* w;  // [kDotKeys][factor] of one part, where W is not read in place
  Scalar* y;  // [kProjectionTile][kProjectColumns]
  std::size_t bytes;

  explicit ProjectScratch(Scratch base) {
    ScratchArena arena(base);
    x = arena.take<Factor>(kProjectionTile * Parts<Rows>::kMost);
    w = arena.take<Factor>(kDotKeys * Parts<Rows>::kMost);
    y = arena.take<Scalar>(kProjectionTile * kProjectColumns);
    bytes = arena.used();
  }
};

/// Stores a block of products, [row][stride], plus the bias, to y.
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

/// Calls body(task) for a task's columns, at most `columns` at a time.
template <class Body>
inline void for_each_columns(ProjectionTask task, std::int64_t columns, const Body& body) {
  const std::int64_t end = task.column_end;
  for (; task.column_begin < end; task.column_begin += columns) {
    task.column_end = smaller(task.column_begin + columns, end);
    body(task);
  }
}

/// Computes y of one block of rows and columns by dot products.
template <class Rows>
class DotProjection {
 public:
  DotProjection(const ProjectionParams& params, const ProjectionTask& task, Scratch memory)
      : params_(params),
        task_(task),
        scratch_(memory),
        parts_{params.in_features},
        rows_(task.row_end - task.row_begin),
        in_place_(Rows::in_place(params)) {}

  void run() {
    // Fewer rows take more parts at once, so that W is read along its rows.
    const std::int64_t at_once = kProjectionTile / rows_;
    for (std::int64_t first = 0; first < parts_.count; first += at_once) {
      const std::int64_t end = smaller(first + at_once, parts_.count);
      Factor* x = scratch_.x;
      for (std::int64_t part = first; part < end; ++part) {
        Rows::copy(params_.x, {task_.row_begin, task_.row_end}, parts_.terms(part),
                   {x + parts_.begin(part - first) * rows_, parts_.stride(part)});
      }
      for (std::int64_t n = task_.column_begin; n < task_.column_end; n += kDotKeys) {
        for (std::int64_t part = first; part < end; ++part) {
          add(part, x + parts_.begin(part - first) * rows_, n,
              smaller(n + kDotKeys, task_.column_end));
        }
      }
    }
    for_each_columns(task_, kProjectionTile, [&](const ProjectionTask& narrow) {
      write_block(params_, narrow, scratch_.y + (narrow.column_begin - task_.column_begin),
                  kProjectColumns);
    });
  }

 private:
  using V = typename Rows::Sums;
  using Factor = typename Rows::Factor;

  const char* weights(std::int64_t column, std::int64_t part) const {
    return static_cast<const char*>(
        at(params_.w.data, params_.w.dtype, column * params_.w.stride + parts_.first_term(part)));
  }

  /// Adds a part's products to columns [begin, end).
  void add(std::int64_t part, const Factor* x, std::int64_t begin, std::int64_t end) const {
    const std::int64_t stride = parts_.stride(part);
    const char* lines[kDotKeys];
    for (std::int64_t i = 0; i < end - begin; ++i) {
      lines[i] = in_place_ ? weights(begin + i, part)
                           : reinterpret_cast<const char*>(scratch_.w + i * stride);
    }
    if (!in_place_) {
      Rows::copy(params_.w, {begin, end}, parts_.terms(part), {scratch_.w, stride});
    }
    // Prefetches the next rows of W. Where there are none, or they will be copied, the distance is
    // 0: the lines are in L1 already.
    const bool some_ahead = in_place_ && end + kDotKeys <= params_.out_features;
    const BytesAhead ahead{some_ahead ? weights(end, part) - weights(begin, part) : 0};
    Rows::with_weights(in_place_ ? params_.w.dtype : kDTypeOf<Factor>, [&](auto stored) {
      dot_products<V, decltype(stored)::kDType>(
          {.rows = rows_, .width = end - begin, .depth = parts_.end(part) - parts_.begin(part)},
          {x, stride}, {lines, 0},
          {.data = scratch_.y + (begin - task_.column_begin),
           .stride = kProjectColumns,
           .accumulate = part > 0},
          ahead);
    });
  }

  const ProjectionParams& params_;
  const ProjectionTask& task_;
  ProjectScratch<Rows> scratch_;
  Parts<Rows> parts_;
  std::int64_t rows_;
  bool in_place_;
};

template <class Rows>
void project_rows(const ProjectionParams& params, const ProjectionTask& task, Scratch memory) {
  DotProjection<Rows>(params, task, memory).run();
}

template <class V>
void project(const ProjectionParams& params, const ProjectionTask& task, Scratch memory) {
  project_rows<ElementRows<V>>(params, task, memory);
}
template <class V>
std::size_t project_scratch(const ProjectionParams&) {
  return ProjectScratch<ElementRows<V>>({}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
