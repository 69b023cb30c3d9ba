// Dot products of rows: out[row][key] (+)= a[row] . b[key], with b in its stored type.
//
// Lanes run along the vectors that are multiplied; each product ends with one horizontal sum. The
// order of a sum depends on the length alone, so that a row's bits do not depend on how many rows
// there are. As in gemm.inl, factors may be bf16 pairs; lengths then count pairs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/operands.inl"
#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

// Rows and keys of one register block: kRows * kKeys sums, kKeys operands and one more.
inline constexpr int kDotKeys = 4;
template <class V>
constexpr int kDotRows = V::kGemmRows >= 6 ? 6 : 2;

/// Stores four horizontal sums, or adds them to `to`.
template <class V>
inline void put_sums(typename V::Scalar* to, bool accumulate, V a, V b, V c, V d) {
  if (!accumulate) return store_sums(to, a, b, c, d);
  // As one vector: the compiler would add the four one by one.
  using Scalar = typename V::Scalar;
  using Four [[gnu::vector_size(4 * sizeof(Scalar))]] = Scalar;
  Scalar sums[4];
  store_sums(sums, a, b, c, d);
  Four before;
  Four added;
  __builtin_memcpy(&before, to, sizeof(Four));
  __builtin_memcpy(&added, sums, sizeof(Four));
  before += added;
  __builtin_memcpy(to, &before, sizeof(Four));
}

/// What is prefetched while products are taken: nothing, or the lines `distance` bytes past b.
struct NothingAhead {
  void prefetch(const char*) const {}
};
struct BytesAhead {
  std::int64_t distance;
  void prefetch(const char* b) const { prefetch_line(b + distance); }
};

/// kKeys x kRows products of length `dim`.
template <class V, DType kStored, int kKeys, int kRows, class Ahead>
inline void dot_registers(std::int64_t dim, FactorRows<V> a, StoredRows b, SumTarget<V> out,
                          const Ahead& ahead) {
  constexpr auto kSize = static_cast<std::int64_t>(size_of(kStored));
  V sums[std::size_t{kRows}][std::size_t{kKeys}];
  const char* keys[std::size_t{kKeys}];
  LADON_UNROLL
  for (int k = 0; k < kKeys; ++k) keys[k] = b[k];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) sums[r][k] = zero<V>();
  }
  // Behind a call the sums would be in memory: projections of 4 rows were half as fast.
  const auto add = [&](std::int64_t i, const auto& load_key) __attribute__((always_inline)) {
    typename V::Factors key[std::size_t{kKeys}];
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) key[k] = load_key(keys[k]);
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto row = load<typename V::Factors>(a.at(r, i));
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) sums[r][k] = fma(row, key[k], sums[r][k]);
    }
  };
  std::int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) {
    add(i, [i](const char* key) { return load_stored<typename V::Factors, kStored>(key, i); });
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) ahead.prefetch(keys[k] + i * kSize);
  }
  if (i < dim) {
    add(i, [i, dim](const char* key) {
      return load_stored_last<typename V::Factors, kStored>(key, i, dim);
    });
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    typename V::Scalar* to = out.at(r, 0);
    if constexpr (kKeys == 4) {
      put_sums(to, out.accumulate, sums[r][0], sums[r][1], sums[r][2], sums[r][3]);
    } else {
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        const typename V::Scalar product = sum(sums[r][k]);
        to[k] = out.accumulate ? to[k] + product : product;
      }
    }
  }
}

/// The last rows, fewer than kDotRows.
template <class V, DType kStored, int kKeys, int kRows = kDotRows<V> - 1, class Ahead>
inline void dot_last_rows(std::int64_t rows, std::int64_t dim, FactorRows<V> a, StoredRows b,
                          SumTarget<V> out, const Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      dot_registers<V, kStored, kKeys, kRows>(dim, a, b, out, ahead);
    } else {
      dot_last_rows<V, kStored, kKeys, kRows - 1>(rows, dim, a, b, out, ahead);
    }
  }
}

/// Only the first kDotRows rows prefetch: the lines are the same for all.
template <class V, DType kStored, int kKeys, class Ahead>
inline void dot_rows(std::int64_t rows, std::int64_t dim, FactorRows<V> a, StoredRows b,
                     SumTarget<V> out, const Ahead& ahead) {
  constexpr std::int64_t kRows = kDotRows<V>;
  if (rows < kRows) {
    return dot_last_rows<V, kStored, kKeys>(rows, dim, a, b, out, ahead);
  }
  dot_registers<V, kStored, kKeys, kRows>(dim, a, b, out, ahead);
  std::int64_t r = kRows;
  for (; r + kRows <= rows; r += kRows) {
    dot_registers<V, kStored, kKeys, kRows>(dim, a.from(r, 0), b, out.from(r, 0), NothingAhead{});
  }
  dot_last_rows<V, kStored, kKeys>(rows - r, dim, a.from(r, 0), b, out.from(r, 0), NothingAhead{});
}

/// out[row][key] for size.rows rows of a and size.width rows of b, all of length size.depth. Rows
/// of a are padded to whole vectors with finite elements.
template <class V, DType kStored, class Ahead = NothingAhead>
inline void dot_products(ProductSize size, FactorRows<V> a, StoredRows b, SumTarget<V> out,
                         const Ahead& ahead = {}) {
  std::int64_t k = 0;
  for (; k + kDotKeys <= size.width; k += kDotKeys) {
    dot_rows<V, kStored, kDotKeys>(size.rows, size.depth, a, b.from(k), out.from(0, k), ahead);
  }
  for (; k < size.width; ++k) {
    dot_rows<V, kStored, 1>(size.rows, size.depth, a, b.from(k), out.from(0, k), NothingAhead{});
  }
}

}  // namespace
}  // namespace ladon::cpu
