// Many dot products: out[row][key] = a[row] . b[key], both operands as they lie, b as it is stored.
//
// Lanes run along the vectors that are multiplied; one horizontal sum ends each product. The order
// of each sum depends on the length alone, so a row's bits do not depend on how many rows there
// are. As in gemm.inl, what is multiplied may be pairs; lengths then count pairs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

// Rows and keys held in registers at a time: kRows * kKeys sums, kKeys operands and one more.
inline constexpr int kDotKeys = 4;
template <class V>
constexpr int kDotRows = V::kGemmRows >= 6 ? 6 : 2;

/// kKeys x kRows products of length `dim`.
template <class V, DType kStored, int kKeys, int kRows>
inline void dot_registers(std::int64_t dim, const typename V::Factor* a, std::int64_t a_stride,
                          const StoredRows& b, std::int64_t first_key, typename V::Scalar* out,
                          std::int64_t out_stride) {
  V sums[std::size_t{kRows}][std::size_t{kKeys}];
  const char* keys[std::size_t{kKeys}];
  LADON_UNROLL
  for (int k = 0; k < kKeys; ++k) keys[k] = b[first_key + k];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) sums[r][k] = zero<V>();
  }
  const auto add = [&](std::int64_t i, const auto& load_key) {
    typename V::Factors key[std::size_t{kKeys}];
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) key[k] = load_key(keys[k]);
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto row = load<typename V::Factors>(a + r * a_stride + i);
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) sums[r][k] = fma(row, key[k], sums[r][k]);
    }
  };
  std::int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) {
    add(i, [i](const char* key) { return load_stored<typename V::Factors, kStored>(key, i); });
  }
  if (i < dim) {
    add(i, [i, dim](const char* key) {
      return load_stored_last<typename V::Factors, kStored>(key, i, dim);
    });
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    typename V::Scalar* to = out + r * out_stride + first_key;
    if constexpr (kKeys == 4) {
      store_sums(to, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    } else {
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) to[k] = sum(sums[r][k]);
    }
  }
}

/// The last rows, fewer than kDotRows.
template <class V, DType kStored, int kKeys, int kRows = kDotRows<V> - 1>
inline void dot_last_rows(std::int64_t rows, std::int64_t dim, const typename V::Factor* a,
                          std::int64_t a_stride, const StoredRows& b, std::int64_t first_key,
                          typename V::Scalar* out, std::int64_t out_stride) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      dot_registers<V, kStored, kKeys, kRows>(dim, a, a_stride, b, first_key, out, out_stride);
    } else {
      dot_last_rows<V, kStored, kKeys, kRows - 1>(rows, dim, a, a_stride, b, first_key, out,
                                                  out_stride);
    }
  }
}

template <class V, DType kStored, int kKeys>
inline void dot_rows(std::int64_t rows, std::int64_t dim, const typename V::Factor* a,
                     std::int64_t a_stride, const StoredRows& b, std::int64_t first_key,
                     typename V::Scalar* out, std::int64_t out_stride) {
  std::int64_t r = 0;
  for (; r + kDotRows<V> <= rows; r += kDotRows<V>) {
    dot_registers<V, kStored, kKeys, kDotRows<V>>(dim, a + r * a_stride, a_stride, b, first_key,
                                                  out + r * out_stride, out_stride);
  }
  dot_last_rows<V, kStored, kKeys>(rows - r, dim, a + r * a_stride, a_stride, b, first_key,
                                   out + r * out_stride, out_stride);
}

/// The products of `keys` rows of b from `first_key` on. Rows of a go on to whole vectors with
/// numbers that are finite.
template <class V, DType kStored>
inline void dot_products(std::int64_t rows, std::int64_t first_key, std::int64_t keys,
                         std::int64_t dim, const typename V::Factor* a, std::int64_t a_stride,
                         const StoredRows& b, typename V::Scalar* out, std::int64_t out_stride) {
  std::int64_t k = first_key;
  for (; k + kDotKeys <= first_key + keys; k += kDotKeys) {
    dot_rows<V, kStored, kDotKeys>(rows, dim, a, a_stride, b, k, out, out_stride);
  }
  for (; k < first_key + keys; ++k) {
    dot_rows<V, kStored, 1>(rows, dim, a, a_stride, b, k, out, out_stride);
  }
}

}  // namespace
}  // namespace ladon::cpu
