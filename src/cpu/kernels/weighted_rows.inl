// Weighted sums of rows: out[row] += sum over keys of weights[row][key] * v[key], with v in its
// stored type.
//
// Lanes run along a row of v. Sums stay in registers over all keys, and each vector of v that is
// loaded serves every row. Terms are summed in the order of the keys.
//
// Values are a struct with
//   Sums                            the vector type of the sums
//   kKeys                           keys of one step
//   count, dim                      the number of keys, and of elements of a row
//   load<kVectors>(step, column, value)
//                                   loads a step's vectors from `column` on; the last one is padded
//                                   with zeros
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/operands.inl"
#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

// Rows of one register block. Fewer rows hold more vectors each, so that there are enough
// independent sums to hide FMA latency.
template <class V>
constexpr int kWeightedRows = V::kGemmRows >= 6 ? 6 : 3;
template <class V, int kRows>
constexpr int kWeightedVectors = kRows == 1                          ? 8
                                 : (kRows == 2 || V::kGemmRows >= 6) ? 4
                                                                     : 2;

/// Some columns of the rows to prefetch.
struct ColumnsAhead {
  StoredRows rows;
  std::int64_t count = 0;
  std::int64_t bytes = 0;

  void prefetch(std::int64_t k) const {
    if (k < count) prefetch_row(rows[k], bytes);
  }
};

/// Rows to prefetch: while some columns of row k of v are multiplied, the same columns of row k of
/// these are prefetched; the last columns of v prefetch the rest of the row.
struct RowsAhead {
  StoredRows rows;
  std::int64_t count = 0;
  std::int64_t size = 0;   // of an element
  std::int64_t bytes = 0;  // of a row

  ColumnsAhead columns(std::int64_t begin, std::int64_t end, bool last) const {
    const std::int64_t first = begin * size;
    return {{rows.rows, rows.offset + first},
            count,
            (last ? bytes : smaller(end * size, bytes)) - first};
  }
};

/// Values converted to the compute type, one key per step.
template <class V, DType kStored>
struct ElementValues {
  using Sums = V;
  static constexpr std::int64_t kKeys = 1;
  StoredRows rows;
  std::int64_t count;
  std::int64_t dim;

  template <int kVectors>
  void load(std::int64_t key, std::int64_t column, V* value) const {
    const char* row = rows[key];
    const bool whole = column + kVectors * V::kLanes <= dim;
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      const std::int64_t at_vector = column + n * V::kLanes;
      value[n] = n + 1 < kVectors || whole ? load_stored<V, kStored>(row, at_vector)
                                           : load_stored_last<V, kStored>(row, at_vector, dim);
    }
  }
};

/// kVectors vectors of the columns, from `column` on. Always inlined: it has one caller, and as a
/// function its setup was 4 % of bf16 decoding.
template <int kRows, int kVectors, class Values>
[[gnu::always_inline]] inline void weighted_registers(const Values& values, std::int64_t column,
                                                      FactorRows<typename Values::Sums> weights,
                                                      const RowsAhead& ahead,
                                                      RowBlock<typename Values::Sums::Scalar> out) {
  using V = typename Values::Sums;
  V sums[std::size_t{kRows}][std::size_t{kVectors}];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) sums[r][n] = zero<V>();
  }
  const std::int64_t end = column + kVectors * V::kLanes;
  const ColumnsAhead columns_ahead = ahead.columns(column, end, end >= values.dim);
  for (std::int64_t step = 0; step * Values::kKeys < values.count; ++step) {
    LADON_UNROLL
    for (std::int64_t i = 0; i < Values::kKeys; ++i) {
      columns_ahead.prefetch(step * Values::kKeys + i);
    }
    typename V::Factors value[std::size_t{kVectors}];
    values.template load<kVectors>(step, column, value);
    LADON_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const auto weight = broadcast<typename V::Factors>(*weights.at(r, step));
      LADON_UNROLL
      for (int n = 0; n < kVectors; ++n) sums[r][n] = fma(weight, value[n], sums[r][n]);
    }
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      typename V::Scalar* to = out.at(r, column + n * V::kLanes);
      store(to, load<V>(to) + sums[r][n]);
    }
  }
}

/// kRows rows over the columns from `column` on: kVectors at a time, then half as many.
template <int kRows, int kVectors, class Values>
inline void weighted_columns(const Values& values, FactorRows<typename Values::Sums> weights,
                             const RowsAhead& ahead, RowBlock<typename Values::Sums::Scalar> out,
                             std::int64_t column = 0) {
  constexpr std::int64_t kLanes = Values::Sums::kLanes;
  for (; values.dim - column > (kVectors - 1) * kLanes; column += kVectors * kLanes) {
    weighted_registers<kRows, kVectors>(values, column, weights, ahead, out);
  }
  if constexpr (kVectors > 1) {
    weighted_columns<kRows, kVectors / 2>(values, weights, ahead, out, column);
  }
}

/// At most kRows rows.
template <int kRows, class Values>
inline void weighted_some_rows(std::int64_t rows, const Values& values,
                               FactorRows<typename Values::Sums> weights, RowsAhead ahead,
                               RowBlock<typename Values::Sums::Scalar> out) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      weighted_columns<kRows, kWeightedVectors<typename Values::Sums, kRows>>(values, weights,
                                                                              ahead, out);
    } else {
      weighted_some_rows<kRows - 1>(rows, values, weights, ahead, out);
    }
  }
}

/// There is one weight per row and step. Rows of out are padded to whole vectors. Never inlined:
/// GCC 12 allocates registers worse inside a larger function (3 to 9 % of f32 decoding on AVX2).
template <class Values>
[[gnu::noinline]] void add_weighted_rows(std::int64_t rows, const Values& values,
                                         FactorRows<typename Values::Sums> weights, RowsAhead ahead,
                                         RowBlock<typename Values::Sums::Scalar> out) {
  constexpr int kStep = kWeightedRows<typename Values::Sums>;
  for (std::int64_t r = 0; r < rows; r += kStep) {
    weighted_some_rows<kStep>(smaller(rows - r, kStep), values, weights.from(r, 0), ahead,
                              out.from(r, 0));
    ahead.count = 0;  // prefetched by the first rows
  }
}

}  // namespace
}  // namespace ladon::cpu
