// Sums of arrays, and over the heads of a group. The bound is memory: each element is read once.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/exact_rows.inl"

namespace ladon::cpu {
namespace {

template <class V>
void accumulate(const AccumulateParams& params, const ElementRange& range, Scratch) {
  using Scalar = typename V::Scalar;
  const auto* from = static_cast<const Scalar*>(params.from.data);
  auto* to = static_cast<Scalar*>(params.to.data);
  std::int64_t i = range.begin;
  for (; i + V::kLanes <= range.end; i += V::kLanes)
    store(to + i, load<V>(to + i) + load<V>(from + i));
  for (; i < range.end; ++i) to[i] += from[i];
}

template <class V>
std::size_t accumulate_scratch(const AccumulateParams&) {
  return 0;
}

struct HeadSumScratch {
  double* sums;  // [dim]
  double* row;   // [dim]
  std::size_t bytes;

  HeadSumScratch(const HeadSumParams& params, Scratch base) {
    ScratchArena arena(base);
    sums = arena.take<double>(params.dim);
    row = arena.take<double>(params.dim);
    bytes = arena.used();
  }
};

/// Sums in double, head by head in order, and rounds once.
template <class V>
void sum_heads(const HeadSumParams& params, const RowRange& range, Scratch memory) {
  const HeadSumScratch scratch(params, memory);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    for (std::int64_t group = 0; group < params.groups; ++group) {
      for (std::int64_t i = 0; i < params.dim; ++i) scratch.sums[i] = 0;
      for (std::int64_t h = 0; h < params.group; ++h) {
        const std::int64_t head = group * params.group + h;
        load_row(
            at(params.x.data, params.x.dtype, row * params.x.stride + head * params.x_head_stride),
            params.x.dtype, params.dim, scratch.row);
        for (std::int64_t i = 0; i < params.dim; ++i) scratch.sums[i] += scratch.row[i];
      }
      store_rounded(
          scratch.sums, params.dim,
          at(params.y.data, params.y.dtype, row * params.y.stride + group * params.y_head_stride),
          params.y.dtype);
    }
  }
}

template <class V>
std::size_t sum_heads_scratch(const HeadSumParams& params) {
  return HeadSumScratch(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
