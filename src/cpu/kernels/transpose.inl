// Transposes squares of kLanes x kLanes elements in registers.
//
// log2(kLanes) rounds each interleave row i with row i + kLanes / 2: 64 shuffles for 256 elements
// on AVX-512, where a store per element would take 256 stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/kernels/math.inl"

namespace ladon::cpu {
namespace {

/// Alternates the lanes of a and b, from lane kFirst of each on.
template <class V, int kFirst, int... kIndices>
inline V interleave(V a, V b, std::integer_sequence<int, kIndices...>) {
  return {__builtin_shufflevector(a.v, b.v, (kFirst + kIndices / 2 + kIndices % 2 * V::kLanes)...)};
}

/// to[j * to_stride + i] = load_row(i)[j], for the first `count` of j.
template <class V, class LoadRow>
inline void transpose_square(const LoadRow& load_row, std::int64_t count, typename V::Scalar* to,
                             std::int64_t to_stride) {
  constexpr int kHalf = V::kLanes / 2;
  const auto order = std::make_integer_sequence<int, V::kLanes>();
  V rows[std::size_t{V::kLanes}];
  LADON_UNROLL
  for (int i = 0; i < V::kLanes; ++i) rows[i] = load_row(i);
  LADON_UNROLL
  for (int round = 1; round < V::kLanes; round *= 2) {
    V interleaved[std::size_t{V::kLanes}];
    LADON_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      interleaved[2 * i] = interleave<V, 0>(rows[i], rows[i + kHalf], order);
      interleaved[2 * i + 1] = interleave<V, kHalf>(rows[i], rows[i + kHalf], order);
    }
    LADON_UNROLL
    for (int i = 0; i < V::kLanes; ++i) rows[i] = interleaved[i];
  }
  if (count >= V::kLanes) {
    LADON_UNROLL
    for (int j = 0; j < V::kLanes; ++j) store(to + j * to_stride, rows[j]);
    return;
  }
  for (std::int64_t j = 0; j < count; ++j) store(to + j * to_stride, rows[j]);
}

/// to[j][i] = from[i][j] for kLanes rows and `count` columns. Rows of `from` must be readable to a
/// whole number of vectors; what is past `count` is not used.
template <class V>
inline void transpose(std::int64_t count, const typename V::Scalar* from, std::int64_t from_stride,
                      typename V::Scalar* to, std::int64_t to_stride) {
  for (std::int64_t j = 0; j < count; j += V::kLanes) {
    transpose_square<V>([&](int i) { return load<V>(from + i * from_stride + j); }, count - j,
                        to + j * to_stride, to_stride);
  }
}

}  // namespace
}  // namespace ladon::cpu
