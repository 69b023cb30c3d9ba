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

// Keys that are multiplied together, and most rows. In 16 registers 4 rows and more take two keys
// at a time, so that 8 to 12 sums hide the latency of the FMAs and a converted key serves all rows;
// a step of 6 x 2 sums loads 8 vectors for 12 FMAs, of which two are converted. One row takes eight
// keys, for the same reason (in L2 7 to 10 % of all decoding of one row).
inline constexpr int kDotKeys = 4;
inline constexpr int kDotKeysOfOneRow = 8;
inline constexpr int kDotRows = 6;
template <class V, int kRows>
constexpr int kDotKeysAtOnce = V::kGemmRows >= 6 || kRows < 4 ? kDotKeys : 2;

/// Stores kCount sums, or adds them to `to`. As one vector: the compiler would add them one by one.
template <int kCount, class Scalar>
inline void put_sums(Scalar* to, bool accumulate, const Scalar* sums) {
  using Some [[gnu::vector_size(kCount * sizeof(Scalar))]] = Scalar;
  Some result;
  __builtin_memcpy(&result, sums, sizeof(Some));
  if (accumulate) {
    Some before;
    __builtin_memcpy(&before, to, sizeof(Some));
    result = before + result;
  }
  __builtin_memcpy(to, &result, sizeof(Some));
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
  using Factors = typename V::Factors;
  using Scalar = typename V::Scalar;
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
    if constexpr (kRows < kKeys) {  // keeps the rows in registers
      Factors row[std::size_t{kRows}];
      LADON_UNROLL
      for (int r = 0; r < kRows; ++r) row[r] = load<Factors>(a.at(r, i));
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        const Factors key = load_key(keys[k]);
        LADON_UNROLL
        for (int r = 0; r < kRows; ++r) sums[r][k] = fma(row[r], key, sums[r][k]);
      }
    } else {  // keeps the keys in registers
      Factors key[std::size_t{kKeys}];
      LADON_UNROLL
      for (int k = 0; k < kKeys; ++k) key[k] = load_key(keys[k]);
      LADON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        const auto row = in_register(load<Factors>(a.at(r, i)));
        LADON_UNROLL
        for (int k = 0; k < kKeys; ++k) sums[r][k] = fma(row, key[k], sums[r][k]);
      }
    }
  };
  std::int64_t i = 0;
  for (; i + V::kLanes <= dim; i += V::kLanes) {
    add(i, [i](const char* key) { return load_stored<Factors, kStored>(key, i); });
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) ahead.prefetch(keys[k] + i * kSize);
  }
  if (i < dim) {
    add(i, [i, dim](const char* key) { return load_stored_last<Factors, kStored>(key, i, dim); });
  }
  // Four horizontal sums at a time: of one row, or of two rows with two keys each.
  if constexpr (kKeys % 4 == 0) {
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      LADON_UNROLL
      for (int k = 0; k < kKeys; k += 4) {
        Scalar four[4];
        store_sums(four, sums[r][k], sums[r][k + 1], sums[r][k + 2], sums[r][k + 3]);
        put_sums<4>(out.at(r, k), out.accumulate, four);
      }
    }
    return;
  }
  constexpr int kTogether = kKeys == 2 ? 2 : kRows + 1;
  constexpr int kWhole = kRows - kRows % kTogether;
  LADON_UNROLL
  for (int r = 0; r < kWhole; r += kTogether) {
    Scalar four[4];
    const V* first = sums[r];
    const V* second = sums[r + kTogether - 1] + (kKeys - 2);
    store_sums(four, first[0], first[1], second[0], second[1]);
    LADON_UNROLL
    for (int n = 0; n < kTogether; ++n) {
      put_sums<kKeys>(out.at(r + n, 0), out.accumulate, four + n * kKeys);
    }
  }
  LADON_UNROLL
  for (int r = kWhole; r < kRows; ++r) {
    LADON_UNROLL
    for (int k = 0; k < kKeys; ++k) {
      const Scalar product = sum(sums[r][k]);
      Scalar* to = out.at(r, k);
      *to = out.accumulate ? *to + product : product;
    }
  }
}

/// At most kRows rows with kKeys keys.
template <class V, DType kStored, int kKeys, int kRows = kDotRows, class Ahead>
inline void dot_some_rows(std::int64_t rows, std::int64_t dim, FactorRows<V> a, StoredRows b,
                          SumTarget<V> out, const Ahead& ahead) {
  if constexpr (kRows > 0) {
    if (rows != kRows) {
      return dot_some_rows<V, kStored, kKeys, kRows - 1>(rows, dim, a, b, out, ahead);
    }
    constexpr int kStep = kKeys < kDotKeysAtOnce<V, kRows> ? kKeys : kDotKeysAtOnce<V, kRows>;
    LADON_UNROLL
    for (int k = 0; k < kKeys; k += kStep) {
      dot_registers<V, kStored, kStep, kRows>(dim, a, b.from(k), out.from(0, k), ahead);
    }
  }
}

/// Only the first rows prefetch: the lines are the same for all.
template <class V, DType kStored, int kKeys, class Ahead>
inline void dot_rows(std::int64_t rows, std::int64_t dim, FactorRows<V> a, StoredRows b,
                     SumTarget<V> out, const Ahead& ahead) {
  std::int64_t r = register_rows(rows, kDotRows);
  dot_some_rows<V, kStored, kKeys>(r, dim, a, b, out, ahead);
  while (r < rows) {
    const std::int64_t some = register_rows(rows - r, kDotRows);
    dot_some_rows<V, kStored, kKeys>(some, dim, a.from(r, 0), b, out.from(r, 0), NothingAhead{});
    r += some;
  }
}

/// One row with kDotKeysOfOneRow keys. Never inlined: GCC 12 would allocate registers worse for
/// more rows (4 rows on AVX2: 5 % slower).
template <class V, DType kStored, class Ahead>
[[gnu::noinline]] void dot_one_row(std::int64_t dim, FactorRows<V> a, StoredRows b,
                                   SumTarget<V> out, const Ahead& ahead) {
  dot_registers<V, kStored, kDotKeysOfOneRow, 1>(dim, a, b, out, ahead);
}

/// out[row][key] for size.rows rows of a and size.width rows of b, all of length size.depth. Rows
/// of a are padded to whole vectors with finite elements.
template <class V, DType kStored, class Ahead = NothingAhead>
inline void dot_products(ProductSize size, FactorRows<V> a, StoredRows b, SumTarget<V> out,
                         const Ahead& ahead = {}) {
  std::int64_t k = 0;
  for (; size.rows == 1 && k + kDotKeysOfOneRow <= size.width; k += kDotKeysOfOneRow) {
    dot_one_row<V, kStored>(size.depth, a, b.from(k), out.from(0, k), ahead);
  }
  for (; k + kDotKeys <= size.width; k += kDotKeys) {
    dot_rows<V, kStored, kDotKeys>(size.rows, size.depth, a, b.from(k), out.from(0, k), ahead);
  }
  for (; k < size.width; ++k) {
    dot_rows<V, kStored, 1>(size.rows, size.depth, a, b.from(k), out.from(0, k), NothingAhead{});
  }
}

}  // namespace
}  // namespace ladon::cpu
