// Squares of kLanes x kLanes numbers, turned in registers.
//
// log2(kLanes) rounds, each of which interleaves row i with row i + kLanes / 2: 64 shuffles for 256
// numbers on AVX-512, where storing them one by one takes 256 stores.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "cpu/kernels/math.inl"

namespace ladon::cpu {
namespace {

/// Lanes of a and b in turn, from lane kFirst of each on.
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
    V turned[std::size_t{V::kLanes}];
    LADON_UNROLL
    for (int i = 0; i < kHalf; ++i) {
      turned[2 * i] = interleave<V, 0>(rows[i], rows[i + kHalf], order);
      turned[2 * i + 1] = interleave<V, kHalf>(rows[i], rows[i + kHalf], order);
    }
    LADON_UNROLL
    for (int i = 0; i < V::kLanes; ++i) rows[i] = turned[i];
  }
  if (count >= V::kLanes) {
    LADON_UNROLL
    for (int j = 0; j < V::kLanes; ++j) store(to + j * to_stride, rows[j]);
    return;
  }
  for (std::int64_t j = 0; j < count; ++j) store(to + j * to_stride, rows[j]);
}

/// to[j][i] = from[i][j] for kLanes rows and `count` columns. Rows of `from` must be readable, and
/// are not used, to a whole number of vectors.
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
