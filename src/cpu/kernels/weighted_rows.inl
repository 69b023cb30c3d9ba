// Weighted sums of rows: out[row] += sum over keys of weights[row][key] * v[key], v as it is
// stored.
//
// Lanes run along a row of v. Sums stay in registers over all keys, and each vector of v that is
// loaded and widened serves every row. The order of the sum is the order of the keys.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

// Rows that share a pass over v; with fewer rows more vectors are held, so that enough sums are on
// their way at once.
template <class V>
constexpr int kWeightedRows = V::kGemmRows >= 6 ? 6 : 3;
template <class V, int kRows>
constexpr int kWeightedVectors = kRows == 1                          ? 8
                                 : (kRows == 2 || V::kGemmRows >= 6) ? 4
                                                                     : 2;

/// Rows that will be wanted later: while row k of v is multiplied, the same part of theirs is asked
/// for, and with its last part all that is left.
struct RowsAhead {
  StoredRows rows;
  std::int64_t count = 0;
  std::int64_t bytes = 0;  // of each

  void ask(std::int64_t k, std::int64_t begin, std::int64_t end) const {
    if (k < count) prefetch_row(rows[k] + begin, smaller(end, bytes) - begin);
  }
};

/// kVectors vectors of the columns, from `column` on; the last may not be whole.
template <class V, DType kStored, int kRows, int kVectors>
inline void weighted_registers(std::int64_t keys, std::int64_t column, std::int64_t dim,
                               const typename V::Scalar* weights, std::int64_t weights_stride,
                               const StoredRows& v, const RowsAhead& ahead, typename V::Scalar* out,
                               std::int64_t out_stride) {
  constexpr std::int64_t kSize = static_cast<std::int64_t>(size_of(kStored));
  V sums[std::size_t{kRows}][std::size_t{kVectors}];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) sums[r][n] = zero<V>();
  }
  const std::int64_t end = column + kVectors * V::kLanes;
  const bool whole = end <= dim;
  const std::int64_t asked = end < dim ? end * kSize : ahead.bytes;
  for (std::int64_t k = 0; k < keys; ++k) {
    const char* row = v[k];
    ahead.ask(k, column * kSize, asked);
    V value[std::size_t{kVectors}];
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      const std::int64_t at_vector = column + n * V::kLanes;
      value[n] = n + 1 < kVectors || whole ? load_stored<V, kStored>(row, at_vector)
                                           : load_stored_last<V, kStored>(row, at_vector, dim);
    }
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const V weight = broadcast<V>(weights[r * weights_stride + k]);
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) sums[r][n] = fma(weight, value[n], sums[r][n]);
    }
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      typename V::Scalar* to = out + r * out_stride + column + n * V::kLanes;
      store(to, load<V>(to) + sums[r][n]);
    }
  }
}

/// kRows rows over the columns from `column` on: kVectors at a time, then half as many.
template <class V, DType kStored, int kRows, int kVectors = kWeightedVectors<V, kRows>>
inline void weighted_columns(std::int64_t keys, std::int64_t dim, const typename V::Scalar* weights,
                             std::int64_t weights_stride, const StoredRows& v,
                             const RowsAhead& ahead, typename V::Scalar* out,
                             std::int64_t out_stride, std::int64_t column = 0) {
  for (; dim - column > (kVectors - 1) * V::kLanes; column += kVectors * V::kLanes) {
    weighted_registers<V, kStored, kRows, kVectors>(keys, column, dim, weights, weights_stride, v,
                                                    ahead, out, out_stride);
  }
  if constexpr (kVectors > 1) {
    weighted_columns<V, kStored, kRows, kVectors / 2>(keys, dim, weights, weights_stride, v, ahead,
                                                      out, out_stride, column);
  }
}

/// The last rows, fewer than kWeightedRows.
template <class V, DType kStored, int kRows = kWeightedRows<V> - 1>
inline void weighted_last_rows(std::int64_t rows, std::int64_t keys, std::int64_t dim,
                               const typename V::Scalar* weights, std::int64_t weights_stride,
                               const StoredRows& v, const RowsAhead& ahead, typename V::Scalar* out,
                               std::int64_t out_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      weighted_columns<V, kStored, kRows>(keys, dim, weights, weights_stride, v, ahead, out,
                                          out_stride);
    } else {
      weighted_last_rows<V, kStored, kRows - 1>(rows, keys, dim, weights, weights_stride, v, ahead,
                                                out, out_stride);
    }
  }
}

/// Rows of out go on to whole vectors.
template <class V, DType kStored>
void add_weighted_rows(std::int64_t rows, std::int64_t keys, std::int64_t dim,
                       const typename V::Scalar* weights, std::int64_t weights_stride,
                       const StoredRows& v, RowsAhead ahead, typename V::Scalar* out,
                       std::int64_t out_stride) {
  constexpr int kStep = kWeightedRows<V>;
  std::int64_t r = 0;
  for (; r + kStep <= rows; r += kStep) {
    weighted_columns<V, kStored, kStep>(keys, dim, weights + r * weights_stride, weights_stride, v,
                                        ahead, out + r * out_stride, out_stride);
    ahead.count = 0;  // asked for
  }
  weighted_last_rows<V, kStored>(rows - r, keys, dim, weights + r * weights_stride, weights_stride,
                                 v, ahead, out + r * out_stride, out_stride);
}

}  // namespace
}  // namespace ladon::cpu
