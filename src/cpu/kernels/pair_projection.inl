// Projections of bf16 rows by bf16 weights, as dot products of pairs: both lie in memory as pairs,
// so nothing is widened and nothing is packed. Twice the terms a step of what f32 does. Measured
// (Zen 4, docs/projections.md): 90 % of the ceiling of bf16 products for many rows.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/projection.inl"

namespace ladon::cpu {
namespace {

template <class V>
struct PairProjectScratch {
  std::int64_t depth;  // pairs of a row, padded to whole vectors
  Pair* x;             // [kProjectionTile][depth], where x cannot be used as it lies
  Pair* w;             // [kDotKeys][depth], likewise
  float* y;            // [kProjectionTile][kProjectionTile]
  std::size_t bytes;

  PairProjectScratch(const ProjectionParams& params, void* base) {
    ScratchArena arena(base);
    depth = round_up(pairs_in(params.in_features), V::kLanes);
    x = arena.take<Pair>(kProjectionTile * depth);
    w = arena.take<Pair>(kDotKeys * depth);
    y = arena.take<float>(kProjectionTile * kProjectionTile);
    bytes = arena.used();
  }
};

/// Rows [begin, end) of a matrix as `pairs` pairs each: as they lie where that is what they are,
/// else in the staging buffer, `depth` apart and filled up with zeros. The sums are the same.
inline PairMatrix pairs_of(const Matrix& matrix, std::int64_t begin, std::int64_t end,
                           std::int64_t dim, std::int64_t pairs, std::int64_t depth,
                           Pair* staging) {
  const std::uint16_t* first =
      static_cast<const std::uint16_t*>(matrix.data) + begin * matrix.stride;
  if (dim == 2 * pairs && matrix.stride % 2 == 0 &&
      reinterpret_cast<std::uintptr_t>(first) % sizeof(Pair) == 0) {
    return {reinterpret_cast<const Pair*>(first), matrix.stride / 2};
  }
  copy_as_pairs(
      end - begin, dim, depth, [&](std::int64_t row) { return first + row * matrix.stride; },
      staging);
  return {staging, depth};
}

/// y of one block of rows and columns, where x and w are bf16.
template <class V, class Pairs>
void project_pairs(const ProjectionParams& params, const ProjectionTask& task, void* memory) {
  const PairProjectScratch<V> scratch(params, memory);
  const std::int64_t rows = task.row_end - task.row_begin;
  const std::int64_t pairs = pairs_in(params.in_features);
  // Rows of x are read to whole vectors.
  const PairMatrix x = pairs_of(params.x, task.row_begin, task.row_end, params.in_features,
                                scratch.depth, scratch.depth, scratch.x);
  for (std::int64_t n = task.column_begin; n < task.column_end; n += kDotKeys) {
    const std::int64_t count = smaller(kDotKeys, task.column_end - n);
    const PairMatrix w =
        pairs_of(params.w, n, n + count, params.in_features, pairs, scratch.depth, scratch.w);
    const char* lines[kDotKeys];
    for (std::int64_t i = 0; i < count; ++i) lines[i] = reinterpret_cast<const char*>(w.at(i, 0));
    dot_products<Pairs, kDTypeOf<Pair>>(rows, 0, count, pairs, x.data, x.stride,
                                        StoredRows{lines, 0}, scratch.y + (n - task.column_begin),
                                        kProjectionTile);
  }
  write_block(params, task, scratch.y, kProjectionTile);
}

/// Projections whose x is bf16; those whose weights are not, are widened.
template <class V, class Pairs>
void project_of_pairs(const ProjectionParams& params, const ProjectionTask& task, void* memory) {
  if (params.w.dtype == DType::kBF16) return project_pairs<V, Pairs>(params, task, memory);
  project<V>(params, task, memory);
}

template <class V, class Pairs>
std::size_t project_of_pairs_scratch(const ProjectionParams& params) {
  if (params.w.dtype == DType::kBF16) return PairProjectScratch<V>(params, nullptr).bytes;
  return project_scratch<V>(params);
}

}  // namespace
}  // namespace ladon::cpu
