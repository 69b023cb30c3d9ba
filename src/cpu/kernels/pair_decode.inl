// Decoding where q, k and v are all bf16. q.k are dot products of pairs, with both operands in
// place. In the weighted sum of values pairs run along keys: weights are rounded to bf16, and two
// rows of values are paired in registers. Half the steps of forward_decode.inl, and no conversion.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/integer_decode.inl"
#include "cpu/kernels/pairs.inl"

namespace ladon::cpu {
namespace {

/// Values paired in registers, two keys per step.
template <class Pairs>
struct PairValues {
  using Sums = Pairs;
  using Results = Pairs;
  using Factors = typename Pairs::Factors;
  static constexpr bool kHasFactors = false;
  static constexpr std::int64_t kKeys = 2;
  StoredRows rows;
  std::int64_t count;
  std::int64_t dim;

  template <int kVectors, bool kWhole>
  void load(std::int64_t step, std::int64_t column, Factors* value) const {
    if (kVectors > 1 && kWhole && !alone(step)) {
      LADON_UNROLL
      for (int n = 0; n + 1 < kVectors; n += 2) {
        const std::int64_t at_vector = column + n * Pairs::kLanes;
        load_pairs(row(2 * step) + at_vector, row(2 * step + 1) + at_vector, value + n);
      }
      return;
    }
    LADON_UNROLL
    for (int n = 0; n < kVectors; ++n) value[n] = load_one(step, column + n * Pairs::kLanes);
  }

  const std::uint16_t* row(std::int64_t key) const {
    return reinterpret_cast<const std::uint16_t*>(rows[key]);
  }
  bool alone(std::int64_t step) const { return 2 * step + 1 == count; }

  /// One vector of pairs; zeros past the end of a row, and for the missing key of an odd count.
  Factors load_one(std::int64_t step, std::int64_t column) const {
    const std::int64_t elements = smaller(Pairs::kLanes, dim - column);
    if (!alone(step) && elements == Pairs::kLanes) {
      return load_pairs(row(2 * step) + column, row(2 * step + 1) + column);
    }
    alignas(64) std::uint16_t first[32];
    alignas(64) std::uint16_t second[32] = {};
    const auto copy = [&](std::int64_t key, std::uint16_t* to) {
      copy_first(reinterpret_cast<char*>(to), rows[key] + 2 * column, 2 * elements);
    };
    copy(2 * step, first);
    if (!alone(step)) copy(2 * step + 1, second);
    return load_pairs(first, second);
  }
};

template <class V, class Pairs>
struct PairDecode : DotScores<Pairs> {
  using WeightScale = NoWeightScale;
  static constexpr bool kScaled = false;  // scale * q would be rounded
  static constexpr bool kStreams = true;

  template <class Function>
  static void with_keys(DType, const Function& function) {
    function(StoredAs<kDTypeOf<Pair>>{});
  }
  static std::int64_t length(std::int64_t head_dim) { return pairs_in(head_dim); }
  static float load_query(const AttentionParams& params, std::int64_t start,
                          std::int64_t padded_dim, float* to) {
    const auto* row = static_cast<const std::uint16_t*>(params.q.data) + start;
    copy_as_pairs(
        1, params.head_dim, padded_dim, [row](std::int64_t) { return row; },
        reinterpret_cast<Pair*>(to));
    return 1;
  }
  static V load_scores(const float* scores) { return load<V>(scores); }

  static void add_values(const WeightedBlock<V>& block, const WeightScale*) {
    const std::int64_t dim = block.params.value_dim;
    const std::int64_t count = block.keys.count;
    constexpr std::int64_t kPairs = kKeyBlock / 2;
    alignas(64) Pair weights[kDecodeRows * kPairs];
    for (std::int64_t r = 0; r < block.rows; ++r) {
      for (std::int64_t i = 0; i < count; i += V::kLanes) {
        round_to_bf16(reinterpret_cast<std::uint16_t*>(weights + r * kPairs) + i,
                      load<V>(block.weights.at(r, i)));
      }
    }
    PairValues<Pairs> values{
        {block.keys.v, block.head * block.params.v.head_stride * 2}, count, dim};
    // Masked values add nothing, even if they are NaN: non-finite values are zeros in the product,
    // and their terms that are not masked are added after it.
    const StoredRows stored = values.rows;
    const bool finite = !block.masks || all_finite<V, DType::kBF16>(stored, count, dim);
    const char* lines[kKeyBlock];
    if (!finite) {
      const std::int64_t stride = pairs_in(dim);
      Pair* staging = reinterpret_cast<Pair*>(block.staging);
      const auto row_at = [&](std::int64_t key) {
        return reinterpret_cast<const std::uint16_t*>(stored[key]);
      };
      copy_as_pairs(count, dim, stride, row_at, staging);
      clear_not_finite(staging, count * stride);
      for (std::int64_t key = 0; key < count; ++key) {
        lines[key] = reinterpret_cast<const char*>(staging + key * stride);
      }
      values.rows = {lines, 0};
    }
    add_weighted_rows(block.rows, values, {weights}, block.ahead, block.out);
    for (std::int64_t key = 0; !finite && key < count; ++key) {
      add_not_finite(
          {reinterpret_cast<const std::uint16_t*>(stored[key]), dim},
          {.data = block.weights.at(0, key), .stride = block.weights.stride, .count = block.rows},
          {.data = block.out.data, .row_step = 1, .weight_step = block.out.stride});
    }
  }

  /// Rows of pairs take half the memory, so that a row is written where others have been read.
  static void prepare_weights(std::int64_t rows, std::int64_t count, float* weights) {
    auto* const pairs = reinterpret_cast<std::uint16_t*>(weights);
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < count; i += V::kLanes) {
        round_to_bf16(pairs + r * kKeyBlock + i, load<V>(weights + r * kKeyBlock + i));
      }
    }
  }
  static void add_value_group(const WeightedBlock<V>& block, KeyGroup keys,
                              RowBlock<float> carried) {
    const PairValues<Pairs> values{{block.keys.v, block.head * block.params.v.head_stride * 2},
                                   block.keys.count,
                                   block.params.value_dim};
    add_weighted_group(block.rows, values, keys,
                       {reinterpret_cast<const Pair*>(block.weights.data)}, carried, block.out);
  }
};

template <class V, class Pairs>
void forward_decode_of_pairs(const AttentionParams& params, const ForwardTask& task,
                             Scratch memory) {
  if (params.head_dim % 2 == 0) {
    return run_forward_decode<V, PairDecode<V, Pairs>>(params, task, memory);
  }
  forward_decode<V>(params, task, memory);  // the last pair's other half belongs to the next row
}

}  // namespace
}  // namespace ladon::cpu
