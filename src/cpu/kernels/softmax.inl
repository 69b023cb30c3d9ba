// The online softmax: scores of a block of keys to weights, relative to a running maximum, and the
// end of a row. Tiles have rows along lanes and need no horizontal step; decoding has keys along
// lanes.
#pragma once

#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/score_rules.inl"

namespace ladon::cpu {
namespace {

// A lane is rescaled when its maximum grows by more than this, in natural log: 8 * ln 2. Weights
// stay below 2^8, so sums over any key count that fits memory are far from overflow.
template <class V>
constexpr typename V::Scalar kRescaleGrowth = static_cast<typename V::Scalar>(5.545177444479562);

/// The running softmax of some rows.
template <class Scalar>
struct SoftmaxState {
  Scalar* maximum = nullptr;
  Scalar* denominator = nullptr;  // sum of the weights, relative to the maximum
};

/// Converts the scores of one block to weights, lane by lane. Returns whether any lane's maximum
/// moved; `rescale` then holds the factors for the earlier sums. Scores that are not kScaled are
/// multiplied by `scale` first.
template <class V, bool kScaled>
inline bool softmax_block(const BlockRules<typename V::Scalar>& block, typename V::Scalar scale,
                          ScoreTile<typename V::Scalar> scores,
                          SoftmaxState<typename V::Scalar> state, typename V::Scalar* rescale) {
  using C = MathConstants<typename V::Scalar>;
  const V log2e = broadcast<V>(C::kLog2e);
  const V nothing = broadcast<V>(-C::kInfinity);
  const bool plain = block.plain();
  const std::int64_t width = scores.width;
  const auto scaled = [scale](V score) {
    if constexpr (kScaled) return score;
    return score * broadcast<V>(scale);
  };
  bool moved = false;
  for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
    typename V::Scalar* column = scores.data + lane;
    V block_maximum = nothing;
    if (plain) {
      for (std::int64_t i = 0; i < scores.keys; ++i) {
        const V score = scaled(load<V>(column + i * width));
        if constexpr (!kScaled) store(column + i * width, score);
        block_maximum = max(score, block_maximum);
      }
    } else {
      const QueryLanes<V> query = load_lanes<V>(block, lane);
      for (std::int64_t i = 0; i < scores.keys; ++i) {
        const V key = broadcast<V>(static_cast<typename V::Scalar>(i));
        const V score = apply_rules<V, false>(block, query, key, i * width + lane,
                                              scaled(load<V>(column + i * width)), nullptr);
        store(column + i * width, score);
        block_maximum = max(score, block_maximum);
      }
    }
    const V old_maximum = load<V>(state.maximum + lane);
    const auto grew = less(old_maximum + broadcast<V>(kRescaleGrowth<V>), block_maximum);
    const V new_maximum = select(grew, block_maximum, old_maximum);
    const V factor = exp2((old_maximum - new_maximum) * log2e);
    moved = moved || any<V>(grew);
    store(state.maximum + lane, new_maximum);
    store(rescale + lane, factor);
    V sum_even = zero<V>();
    V sum_odd = zero<V>();
    const V masked = broadcast<V>(static_cast<typename V::Scalar>(-0.0));
    const bool mark = block.masks();
    for (std::int64_t i = 0; i < scores.keys; ++i) {
      const V score = load<V>(column + i * width);
      V weight = exp2((score - new_maximum) * log2e);
      if (i % 2 == 0) {
        sum_even = sum_even + weight;
      } else {
        sum_odd = sum_odd + weight;
      }
      if (block.keep != nullptr) weight = weight * load<V>(block.keep + i * width + lane);
      if (mark) weight = select(identical(score, nothing), masked, weight);
      store(column + i * width, weight);
    }
    typename V::Scalar* denominator = state.denominator + lane;
    store(denominator, fma(load<V>(denominator), factor, sum_even + sum_odd));
  }
  return moved;
}

/// One row's scores of a block, which become weights.
template <class Scalar>
struct ScoreRow {
  std::int64_t row;
  std::int64_t keys;
  Scalar* scores;
  const Scalar* value_factors;  // weights are multiplied by them after they were summed; or null
};

/// Converts one row's scores of a block to weights. load_score(i) gives the scores from key i on,
/// scaled; they are in place already if kInPlace. Lanes past the block's keys are selected to be
/// masked weights, so that stale data in scores, extra or keep has no effect. `watch` is shown the
/// weights. Returns the factor for the earlier sums.
template <class V, bool kInPlace, class LoadScore, class Watch>
inline typename V::Scalar softmax_row(const BlockRules<typename V::Scalar>& block,
                                      ScoreRow<typename V::Scalar> of, const LoadScore& load_score,
                                      SoftmaxState<typename V::Scalar> state, Watch& watch) {
  using Scalar = typename V::Scalar;
  const auto [row, key_count, scores, value_factors] = of;
  using C = MathConstants<Scalar>;
  alignas(64) static constexpr auto kIota = [] {
    struct {
      Scalar values[V::kLanes];
    } iota{};
    for (int i = 0; i < V::kLanes; ++i) iota.values[i] = static_cast<Scalar>(i);
    return iota;
  }();
  const V nothing = broadcast<V>(-C::kInfinity);
  V block_maximum = nothing;
  if (block.plain() && key_count % V::kLanes == 0) {
    for (std::int64_t i = 0; i < key_count; i += V::kLanes) {
      const V score = load_score(i);
      if constexpr (!kInPlace) store(scores + i, score);
      block_maximum = max(score, block_maximum);
    }
  } else {
    const V lanes = load<V>(kIota.values);
    const QueryLanes<V> query = broadcast_lanes<V>(block, row);
    for (std::int64_t i = 0; i < key_count; i += V::kLanes) {
      const V key = lanes + broadcast<V>(static_cast<Scalar>(i));
      const V score =
          apply_rules<V, false>(block, query, key, row * kKeyBlock + i, load_score(i), nullptr);
      store(scores + i, score);
      block_maximum = max(score, block_maximum);
    }
  }
  const V log2e = broadcast<V>(C::kLog2e);
  const Scalar top = largest(block_maximum);
  const Scalar old_maximum = *state.maximum;
  Scalar factor = 1;
  // A branch, and rarely taken: weights need not wait for the maximum, and most blocks are spared
  // an exponential.
  if (__builtin_expect(old_maximum + kRescaleGrowth<V> < top, 0)) {
    *state.maximum = top;
    alignas(64) Scalar factors[V::kLanes];
    store(factors, exp2((broadcast<V>(old_maximum) - broadcast<V>(top)) * log2e));
    factor = factors[0];
  }
  const V new_maximum = broadcast<V>(*state.maximum);
  const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
  const Scalar* const keep = block.keep;  // a copy: the stores below may alias the block
  V total = zero<V>();
  for (std::int64_t i = 0; i < key_count; i += V::kLanes) {
    const V score = load<V>(scores + i);
    V weight = exp2((score - new_maximum) * log2e);
    total = total + weight;
    if (keep != nullptr) weight = weight * load<V>(keep + row * kKeyBlock + i);
    if (value_factors != nullptr) weight = weight * load<V>(value_factors + i);
    weight = select(identical(score, nothing), masked, weight);
    watch.add(weight);
    store(scores + i, weight);
  }
  *state.denominator = *state.denominator * factor + sum(total);
  return factor;
}

/// The end of a row: its sums times `factor` are its output.
struct RowFinish {
  double factor;
  double lse;
};

template <class Scalar>
inline RowFinish finish_row(const AttentionParams& params, const ForwardOutput& output,
                            std::int64_t head, Scalar row_maximum, Scalar row_denominator) {
  if (row_denominator == 0) return {0, -__builtin_inf()};  // the row sees no key
  double maximum = static_cast<double>(row_maximum);
  double denominator = static_cast<double>(row_denominator);
  double factor = 1;
  if (params.rules.sinks.data != nullptr && output.add_sinks) {
    const double sink = head_element(params.rules.sinks, head);
    const double top = maximum < sink ? sink : maximum;
    factor = __builtin_exp(maximum - top);
    denominator = denominator * factor + __builtin_exp(sink - top);
    maximum = top;
  }
  return {factor / denominator, maximum + __builtin_log(denominator)};
}

/// Stores a finished row and its lse; `head` counts from the group's first.
template <class Scalar>
inline void write_row(const ForwardOutput& output, std::int64_t token, std::int64_t head,
                      std::int64_t value_dim, const Scalar* row, double lse) {
  store_row(row, value_dim,
            at(output.data, output.dtype, token * output.token_stride + head * output.head_stride),
            output.dtype);
  if (output.lse.data != nullptr) {
    store_lse(output.lse, token * output.lse.token_stride + head * output.lse.head_stride, lse);
  }
}

}  // namespace
}  // namespace ladon::cpu
