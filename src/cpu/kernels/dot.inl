// Many dot products: out[row][key] = a[row] . b[key], both operands as they lie.
//
// Lanes run along the vectors that are multiplied; one horizontal sum ends each product. The order
// of each sum depends on the length alone, so a row's bits do not depend on how many rows there
// are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/math.inl"

namespace ladon::cpu {
namespace {

// Rows and keys held in registers at a time: kRows * kKeys sums, kKeys operands and one more.
inline constexpr int kDotKeys = 4;
template <class V>
constexpr int kDotRows = V::kGemmRows >= 6 ? 6 : 2;

/// kKeys x kRows products of length `dim`, a whole number of vectors.
template <class V, int kKeys, int kRows>
inline void dot_registers(std::int64_t dim, const typename V::Scalar* a, std::int64_t a_stride,
                          const typename V::Scalar* b, std::int64_t b_stride,
                          typename V::Scalar* out, std::int64_t out_stride) {
  V sums[std::size_t{kRows}][std::size_t{kKeys}];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) sums[r][k] = zero<V>();
  }
  for (std::int64_t i = 0; i < dim; i += V::kLanes) {
    V key[std::size_t{kKeys}];
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) key[k] = load<V>(b + k * b_stride + i);
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const V row = load<V>(a + r * a_stride + i);
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) sums[r][k] = fma(row, key[k], sums[r][k]);
    }
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) out[r * out_stride + k] = sum(sums[r][k]);
  }
}

/// The last rows, fewer than kDotRows.
template <class V, int kKeys, int kRows = kDotRows<V> - 1>
inline void dot_last_rows(std::int64_t rows, std::int64_t dim, const typename V::Scalar* a,
                          std::int64_t a_stride, const typename V::Scalar* b, std::int64_t b_stride,
                          typename V::Scalar* out, std::int64_t out_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      dot_registers<V, kKeys, kRows>(dim, a, a_stride, b, b_stride, out, out_stride);
    } else {
      dot_last_rows<V, kKeys, kRows - 1>(rows, dim, a, a_stride, b, b_stride, out, out_stride);
    }
  }
}

template <class V, int kKeys>
inline void dot_rows(std::int64_t rows, std::int64_t dim, const typename V::Scalar* a,
                     std::int64_t a_stride, const typename V::Scalar* b, std::int64_t b_stride,
                     typename V::Scalar* out, std::int64_t out_stride) {
  std::int64_t r = 0;
  for (; r + kDotRows<V> <= rows; r += kDotRows<V>) {
    dot_registers<V, kKeys, kDotRows<V>>(dim, a + r * a_stride, a_stride, b, b_stride,
                                         out + r * out_stride, out_stride);
  }
  dot_last_rows<V, kKeys>(rows - r, dim, a + r * a_stride, a_stride, b, b_stride,
                          out + r * out_stride, out_stride);
}

/// `dim` is a whole number of vectors; both operands must be readable that far.
template <class V>
void dot_products(std::int64_t rows, std::int64_t keys, std::int64_t dim,
                  const typename V::Scalar* a, std::int64_t a_stride,
                  const Block<typename V::Scalar>& b, typename V::Scalar* out,
                  std::int64_t out_stride) {
  std::int64_t k = 0;
  for (; k + kDotKeys <= keys; k += kDotKeys) {
    dot_rows<V, kDotKeys>(rows, dim, a, a_stride, b.data + k * b.stride, b.stride, out + k,
                          out_stride);
  }
  for (; k < keys; ++k) {
    dot_rows<V, 1>(rows, dim, a, a_stride, b.data + k * b.stride, b.stride, out + k, out_stride);
  }
}

}  // namespace
}  // namespace ladon::cpu
