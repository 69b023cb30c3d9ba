// Weighted sums of rows: out[row] += sum over keys of weights[row][key] * v[key], with v in its
// stored type.
//
// Lanes run along a row of v. Sums stay in registers over all keys, and each vector of v that is
// loaded serves every row. Terms are summed in the order of the keys.
//
// Values are a struct with
//   Sums                            the vector type of the sums
//   Results                         the vector type of out
//   kHasFactors                     whether a row's sums are multiplied by a factor in the end
//   kKeys                           keys of one step
//   count, dim                      the number of keys, and of elements of a row
//   load<kVectors, kWhole>(step, column, value)
//                                   loads a step's vectors from `column` on; unless they are whole,
//                                   the last one is padded with zeros
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/key_rows.inl"
#include "cpu/kernels/operands.inl"
#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/stored_rows.inl"

namespace ladon::cpu {
namespace {

// Most rows of one register block. Fewer rows hold more vectors each, so that there are enough
// independent sums to hide FMA latency: 8 to 12 in 16 registers, up to 24 in 32.
inline constexpr int kWeightedRows = 6;
template <class V, int kRows>
constexpr int kWeightedVectors = kRows == 1                         ? 8
                                 : (kRows < 4 || V::kGemmRows >= 6) ? 4
                                                                    : 2;

/// The weights of a block of keys, a row after the other. The distance is a constant: the pointers
/// and strides of several rows would not fit the general registers.
template <class Values>
struct WeightRows {
  using Factor = typename Values::Sums::Factor;
  const Factor* data = nullptr;
  const typename Values::Results::Scalar* factors = nullptr;  // of the rows, where they have any
  const Factor* at(std::int64_t row, std::int64_t step) const {
    return data + (row * (kKeyBlock / Values::kKeys) + step);
  }
  WeightRows from(std::int64_t row) const {
    return {at(row, 0), Values::kHasFactors ? factors + row : nullptr};
  }
};

// Bytes that are prefetched at a time: keys of so many are summed in between. More would hold all
// of a core's miss buffers (f32, 8 KiB at a time: 3 to 7 % slower on Zen 5), and less takes more
// loops (int8 with AVX2, 512 bytes: 2 %).
inline constexpr std::int64_t kAheadBytes = 2048;

/// Values converted to the compute type, one key per step.
template <class V, DType kStored>
struct ElementValues {
  using Sums = V;
  using Results = V;
  static constexpr bool kHasFactors = false;
  static constexpr std::int64_t kKeys = 1;
  StoredRows rows;
  std::int64_t count;
  std::int64_t dim;

  template <int kVectors, bool kWhole>
  void load(std::int64_t key, std::int64_t column, V* value) const {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      const std::int64_t at_vector = column + n * V::kLanes;
      value[n] = n + 1 < kVectors || kWhole
                     ? load_stored<V, kStored>(rows[key], at_vector)
                     : load_stored_last<V, kStored>(rows[key], at_vector, dim);
    }
  }
};

/// All steps of a block, and what is prefetched meanwhile.
struct WholeBlock {
  static constexpr bool kCarries = false;
  std::int64_t begin = 0;
  std::int64_t end;
  std::int64_t steps_at_once;  // between two prefetches
  RowsAhead& ahead;
};

/// Some steps of a block. Sums of the steps before them are carried in memory, and are added to out
/// with the last step: the same additions in the same order as for the whole block.
template <class Values>
struct StepGroup {
  static constexpr bool kCarries = true;
  std::int64_t begin;
  std::int64_t end;
  bool last;
  RowBlock<typename Values::Sums::Scalar> carried;  // [row][column], padded to whole vectors
};

/// kVectors vectors of the columns, from `column` on. Always inlined: it has one caller, and as a
/// function its setup was 4 % of bf16 decoding.
template <int kRows, int kVectors, bool kWhole, class Values, class Steps>
[[gnu::always_inline]] inline void weighted_registers(
    const Values& values, const Steps& steps, std::int64_t column, WeightRows<Values> weights,
    RowBlock<typename Values::Results::Scalar> out) {
  using V = typename Values::Sums;
  using Factors = typename V::Factors;
  V sums[std::size_t{kRows}][std::size_t{kVectors}];
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      sums[r][n] = zero<V>();
      if constexpr (Steps::kCarries) {
        if (steps.begin != 0) sums[r][n] = load<V>(steps.carried.at(r, column + n * V::kLanes));
      }
    }
  }
  const std::int64_t width = round_up(values.dim, V::kLanes);
  for (std::int64_t step = steps.begin; step < steps.end;) {
    std::int64_t end = steps.end;
    if constexpr (!Steps::kCarries) {
      end = smaller(step + steps.steps_at_once, end);
      steps.ahead.advance((end - step) * kVectors * V::kLanes, steps.end * width);
    }
    for (; step < end; ++step) {
      constexpr int kRegisters = V::kGemmRows >= 6 ? 32 : 16;
      if constexpr (Values::kKeys == 1 && (kRows + 1) * kVectors >= kRegisters) {
        // Keeps the weights in registers: values would not fit alongside the sums.
        Factors weight[std::size_t{kRows}];
        LADON_UNROLL
        for (int r = 0; r < kRows; ++r) weight[r] = broadcast<Factors>(*weights.at(r, step));
        LADON_UNROLL
        for (int n = 0; n < kVectors; ++n) {
          Factors value;
          values.template load<1, kWhole>(step, column + n * V::kLanes, &value);
          LADON_UNROLL
          for (int r = 0; r < kRows; ++r) sums[r][n] = fma(weight[r], value, sums[r][n]);
        }
      } else {
        Factors value[std::size_t{kVectors}];
        values.template load<kVectors, kWhole>(step, column, value);
        LADON_UNROLL
        for (int r = 0; r < kRows; ++r) {
          const auto weight = broadcast<Factors>(*weights.at(r, step));
          LADON_UNROLL
          for (int n = 0; n < kVectors; ++n) sums[r][n] = fma(weight, value[n], sums[r][n]);
        }
      }
    }
  }
  if constexpr (Steps::kCarries) {
    if (!steps.last) {
      LADON_UNROLL
      for (int r = 0; r < kRows; ++r) {
        LADON_UNROLL
        for (int n = 0; n < kVectors; ++n) {
          store(steps.carried.at(r, column + n * V::kLanes), sums[r][n]);
        }
      }
      return;
    }
  }
  LADON_UNROLL
  for (int r = 0; r < kRows; ++r) {
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) {
      using Results = typename Values::Results;
      typename Results::Scalar* to = out.at(r, column + n * V::kLanes);
      if constexpr (Values::kHasFactors) {
        const auto factor = broadcast<Results>(weights.factors[r]);
        store(to, fma(to_float(sums[r][n]), factor, load<Results>(to)));
      } else {
        store(to, load<Results>(to) + sums[r][n]);
      }
    }
  }
}

/// kRows rows over the columns from `column` on: kVectors at a time, then half as many; in the end
/// a vector that is not whole.
template <int kRows, int kVectors, class Values, class Steps>
inline void weighted_columns(const Values& values, const Steps& steps, WeightRows<Values> weights,
                             RowBlock<typename Values::Results::Scalar> out,
                             std::int64_t column = 0) {
  constexpr std::int64_t kWidth = kVectors * Values::Sums::kLanes;
  for (; column + kWidth <= values.dim; column += kWidth) {
    weighted_registers<kRows, kVectors, true>(values, steps, column, weights, out);
  }
  if constexpr (kVectors > 1) {
    weighted_columns<kRows, kVectors / 2>(values, steps, weights, out, column);
  } else if (column < values.dim) {
    weighted_registers<kRows, 1, false>(values, steps, column, weights, out);
  }
}

/// At most kRows rows.
template <int kRows, class Values, class Steps>
inline void weighted_some_rows(std::int64_t rows, const Values& values, const Steps& steps,
                               WeightRows<Values> weights,
                               RowBlock<typename Values::Results::Scalar> out) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      weighted_columns<kRows, kWeightedVectors<typename Values::Sums, kRows>>(values, steps,
                                                                              weights, out);
    } else {
      weighted_some_rows<kRows - 1>(rows, values, steps, weights, out);
    }
  }
}

/// There is one weight per row and step. Rows of out are padded to whole vectors. Never inlined:
/// GCC 12 allocates registers worse inside a larger function (3 to 9 % of f32 decoding on AVX2).
template <class Values>
[[gnu::noinline]] void add_weighted_rows(std::int64_t rows, const Values& values,
                                         WeightRows<Values> weights, RowsAhead ahead,
                                         RowBlock<typename Values::Results::Scalar> out) {
  const WholeBlock steps{.end = (values.count + Values::kKeys - 1) / Values::kKeys,
                         .steps_at_once = larger(1, kAheadBytes / (Values::kKeys * ahead.bytes)),
                         .ahead = ahead};
  for (std::int64_t r = 0; r < rows;) {
    const std::int64_t some = register_rows(rows - r, kWeightedRows);
    weighted_some_rows<kWeightedRows>(some, values, steps, weights.from(r), out.from(r, 0));
    ahead.count = 0;  // prefetched by the first rows
    r += some;
  }
}

/// Keys of a block: [begin, end), begin even.
struct KeyGroup {
  std::int64_t begin;
  std::int64_t end;
};

/// The same sums in several calls with some keys each, in order, which carry them in `carried`.
/// Prefetches nothing.
template <class Values>
[[gnu::noinline]] void add_weighted_group(std::int64_t rows, const Values& values, KeyGroup keys,
                                          WeightRows<Values> weights,
                                          RowBlock<typename Values::Sums::Scalar> carried,
                                          RowBlock<typename Values::Results::Scalar> out) {
  StepGroup<Values> steps{.begin = keys.begin / Values::kKeys,
                          .end = (keys.end + Values::kKeys - 1) / Values::kKeys,
                          .last = keys.end == values.count,
                          .carried = carried};
  for (std::int64_t r = 0; r < rows;) {
    const std::int64_t some = register_rows(rows - r, kWeightedRows);
    steps.carried = carried.from(r, 0);
    weighted_some_rows<kWeightedRows>(some, values, steps, weights.from(r), out.from(r, 0));
    r += some;
  }
}

}  // namespace
}  // namespace ladon::cpu
