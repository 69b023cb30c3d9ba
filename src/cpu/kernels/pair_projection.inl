// Projections of bf16 rows by bf16 weights, as dot products of pairs. Both operands are stored as
// pairs, so that nothing is converted and weights are not packed. A step takes twice the terms of
// f32. Measured (Zen 4, docs/projections.md): 1024 rows at 80 to 85 % of bf16 products, 64 at 55 to
// 75 %.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/projection.inl"

namespace ladon::cpu {
namespace {

/// Rows of a projection as pairs.
template <class Pairs>
struct PairRows {
  using Sums = Pairs;
  using Factor = Pair;
  static constexpr std::int64_t kTerms = 2;  // per factor

  static void copy(const Matrix& matrix, RowRange rows, ElementRange terms, RowBlock<Pair> to) {
    const std::uint16_t* data = static_cast<const std::uint16_t*>(matrix.data) + terms.begin;
    copy_as_pairs(
        rows.end - rows.begin, terms.end - terms.begin, to.stride,
        [&](std::int64_t row) { return data + (rows.begin + row) * matrix.stride; }, to.data);
  }
  /// Whether W is read in place: rows are whole pairs, aligned as the compiler may assume.
  static bool in_place(const ProjectionParams& params) {
    return params.in_features % kTerms == 0 && params.w.stride % kTerms == 0 &&
           reinterpret_cast<std::uintptr_t>(params.w.data) % sizeof(Pair) == 0;
  }
  template <class Body>
  static void with_weights(DType, const Body& body) {
    body(StoredAs<kDTypeOf<Pair>>{});
  }
};

/// Projections whose x is bf16. Where the weights are not, x is converted to f32.
template <class V, class Pairs>
void project_of_pairs(const ProjectionParams& params, const ProjectionTask& task, Scratch memory) {
  if (params.w.dtype == DType::kBF16) {
    return project_rows<PairRows<Pairs>>(params, task, memory);
  }
  project<V>(params, task, memory);
}

template <class V, class Pairs>
std::size_t project_of_pairs_scratch(const ProjectionParams& params) {
  if (params.w.dtype == DType::kBF16) {
    return ProjectScratch<PairRows<Pairs>>({}).bytes;
  }
  return project_scratch<V>(params);
}

}  // namespace
}  // namespace ladon::cpu
