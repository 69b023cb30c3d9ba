// The five matrix products of the backward pass for bf16, as sums of products of pairs in f32.
//
// q and dout are paired twice per tile: along each row for scores and dP, and two rows at a time
// for dk and dv. Weights and dS are rounded to bf16 once; stored as [key][row] they are pairs along
// rows. dS is paired a second time, two keys at a time, for dq. So is K, once for all tiles.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/backward.inl"
#include "cpu/kernels/forward_tile.inl"
#include "cpu/kernels/pairs.inl"
#include "cpu/kernels/row_scales.inl"

namespace ladon::cpu {
namespace {

template <class V, class Engine>
class PairBackward {
 public:
  static constexpr bool kScaled = false;  // scale * q would be rounded

  PairBackward(const AttentionParams& params, ScratchArena& arena)
      : head_depth_(round_up(pairs_in(params.head_dim), kUnit)),
        value_depth_(round_up(pairs_in(params.value_dim), kUnit)),
        head_dim_(round_up(params.head_dim, V::kLanes)),
        value_dim_(round_up(params.value_dim, V::kLanes)),
        column_dim_(round_up(params.head_dim, kUnit)),
        q_(arena.take<Pair>(head_depth_ * kTileRows<V>)),
        dout_(arena.take<Pair>(value_depth_ * kTileRows<V>)),
        q_rows_(arena.take<Pair>(kRowPairs * head_dim_)),
        dout_rows_(arena.take<Pair>(kRowPairs * value_dim_)),
        staging_(arena.take<Pair>(kKeyBlock * larger(head_depth_, value_depth_))),
        weights_(arena.take<Pair>(kKeyBlock * kRowPairs)),
        dscores_(arena.take<Pair>(kKeyBlock * kRowPairs)),
        key_pairs_(arena.take<Pair>(kBackwardKeys / 2 * column_dim_)),
        dscore_pairs_(arena.take<Pair>(kKeyBlock / 2 * kTileRows<V>)),
        column_scratch_(arena.take<Pair>(kUnit == 1 ? 0 : kBackwardKeys / 2 * column_dim_)),
        dq_(arena.take<float>(column_dim_ == params.head_dim ? 0 : column_dim_ * kTileRows<V>)) {
    static_assert(kRowPairs % kUnit == 0 && V::kLanes % kUnit == 0 && kKeyBlock / 2 % kUnit == 0);
  }

  /// Pairs the task's keys for dq, once for all tiles.
  void load_keys(const KeySpan& task) {
    engine_.begin();
    first_key_ = task.begin;
    for (std::int64_t i = 0; i * kKeyBlock < task.count(); ++i) {
      const std::int64_t first = i * kKeyBlock;
      Pair* to = key_pairs_ + first / 2 * column_dim_;
      const std::int64_t pairs = pairs_of_keys(smaller(kKeyBlock, task.count() - first));
      finite_keys_[i] = pair_finite(
          pairs, task.params.head_dim, column_dim_,
          [&](std::int64_t key) { return row_of<KvPart::kKeys>(task, first + key); }, to);
      keys_[i] = engine_.columns(column_dim_, pairs, to, column_scratch_ + first / 2 * column_dim_);
    }
  }

  void load_rows(const AttentionParams& params, const Sequence& sequence, const QueryRows& rows,
                 std::int64_t width) {
    const QueryOperand q{params.q, sequence.q, rows, params.head_dim};
    const QueryOperand dout{params.dout, sequence.dout, rows, params.value_dim};
    pair_along_rows(q, width, head_depth_, q_);
    pair_along_rows(dout, width, value_depth_, dout_);
    finite_ = pair_tile(q, width, {q_rows_, head_dim_});
    finite_ = pair_tile(dout, width, {dout_rows_, value_dim_}) && finite_;
  }

  void score(const KeySpan& span, const BackwardScores<float>& tile) {
    const std::int64_t rows = round_up(span.count(), kUnit);
    engine_.multiply({.rows = rows, .width = tile.width, .depth = head_depth_},
                     pairs_as_stored<KvPart::kKeys, kUnit>(span, head_depth_, staging_),
                     {q_, tile.width}, {tile.scores, tile.width});
    if (tile.dscores == nullptr) return;
    engine_.multiply({.rows = rows, .width = tile.width, .depth = value_depth_},
                     pairs_as_stored<KvPart::kValues, kUnit>(span, value_depth_, staging_),
                     {dout_, tile.width}, {tile.dscores, tile.width});
  }

  void add_gradients(const KeySpan& span, bool, const QueryRows& rows,
                     const BackwardScores<float>& tile, const GradientSums<float>& sums) {
    const std::int64_t keys = round_up(span.count(), kUnit);
    const std::int64_t depth = round_up(pairs_in(tile.width), kUnit);
    round_block({tile.scores, span.count(), tile.width}, keys, rows.count, depth, weights_);
    round_block({tile.dscores, span.count(), tile.width}, keys, rows.count, depth, dscores_);
    engine_.multiply({.rows = keys, .width = value_dim_, .depth = depth}, {weights_, kRowPairs},
                     {dout_rows_, value_dim_},
                     {.data = sums.dv, .stride = value_dim_, .accumulate = true});
    engine_.multiply({.rows = keys, .width = head_dim_, .depth = depth}, {dscores_, kRowPairs},
                     {q_rows_, head_dim_},
                     {.data = sums.dk, .stride = head_dim_, .accumulate = true});
    if (!finite_) add_rows_not_finite(span, rows, tile, sums);
    add_dq(span, {tile.dscores, span.count(), tile.width}, sums.dq);
  }

 private:
  static constexpr std::int64_t kUnit = Engine::kUnit;
  static constexpr std::int64_t kRowPairs = kTileRows<V> / 2;

  /// Pairs rows of a tile two by two, [row pair][padded dim]. Returns whether all were finite.
  static bool pair_tile(const QueryOperand& from, std::int64_t width, RowBlock<Pair> to) {
    return pair_finite(
        round_up(pairs_in(width), kUnit), from.dim, to.stride,
        [&](std::int64_t r) { return row_of(from, r); }, to.data);
  }

  /// Rounds a tile to bf16, as padded_count rows of kRowPairs pairs. Padding and missing rows
  /// become zeros: their lanes may hold anything.
  static void round_block(const ScoreTile<const float>& from, std::int64_t padded_count,
                          std::int64_t row_count, std::int64_t depth, Pair* to) {
    for (std::int64_t key = 0; key < padded_count; ++key) {
      std::uint16_t* row = reinterpret_cast<std::uint16_t*>(to + key * kRowPairs);
      const std::int64_t used = key < from.keys ? row_count : 0;
      for (std::int64_t lane = 0; lane < used; lane += V::kLanes) {
        round_to_bf16(row + lane, load<V>(from.data + key * from.width + lane));
      }
      __builtin_memset(row + used, 0, static_cast<std::size_t>(2 * depth - used) * sizeof(*row));
    }
  }

  void add_rows_not_finite(const KeySpan& span, const QueryRows& rows,
                           const BackwardScores<float>& tile,
                           const GradientSums<float>& sums) const {
    const AttentionParams& params = span.params;
    const QueryOperand q{params.q, span.sequence.q, rows, params.head_dim};
    const QueryOperand dout{params.dout, span.sequence.dout, rows, params.value_dim};
    for (std::int64_t r = 0; r < rows.count; ++r) {
      add_not_finite({row_of(dout, r), dout.dim},
                     {.data = tile.scores + r, .stride = tile.width, .count = span.count()},
                     {.data = sums.dv, .row_step = 1, .weight_step = value_dim_});
      add_not_finite({row_of(q, r), q.dim},
                     {.data = tile.dscores + r, .stride = tile.width, .count = span.count()},
                     {.data = sums.dk, .row_step = 1, .weight_step = head_dim_});
    }
  }

  void add_dq(const KeySpan& span, const ScoreTile<const float>& dscores, float* dq) {
    const std::int64_t dim = span.params.head_dim;
    const std::int64_t width = dscores.width;
    const std::int64_t block = (span.begin - first_key_) / kKeyBlock;
    const std::int64_t pairs = pairs_of_keys(span.count());
    pair_weights(dscores, pairs, dscore_pairs_);
    // Whole units may write past the end of dq.
    const bool direct = column_dim_ == dim;
    engine_.multiply_columns(0, {.rows = column_dim_, .width = width, .depth = pairs}, keys_[block],
                             {dscore_pairs_, width},
                             {.data = direct ? dq : dq_, .stride = width, .accumulate = direct});
    if (!direct) fold_rows<V>(dq_, dim, width, false, dq);
    for (std::int64_t key = 0; !finite_keys_[block] && key < span.count(); ++key) {
      add_not_finite({row_of<KvPart::kKeys>(span, key), dim},
                     {.data = dscores.data + key * width, .stride = 1, .count = width},
                     {.data = dq, .row_step = width, .weight_step = 1});
    }
  }

  static std::int64_t pairs_of_keys(std::int64_t count) { return round_up(pairs_in(count), kUnit); }

  Engine engine_;
  bool finite_ = true;                           // all elements of q and dout are finite
  bool finite_keys_[kBackwardKeys / kKeyBlock];  // all elements of K are, per block
  PairMatrix keys_[kBackwardKeys / kKeyBlock];   // per block, as multiply_columns() takes them
  std::int64_t first_key_ = 0;
  std::int64_t head_depth_;  // pairs of a row of q or K, padded
  std::int64_t value_depth_;
  std::int64_t head_dim_;  // padded to whole vectors
  std::int64_t value_dim_;
  std::int64_t column_dim_;  // head_dim padded to whole units
  Pair* q_;                  // [head_depth][width], along rows
  Pair* dout_;               // [value_depth][width], along rows
  Pair* q_rows_;             // [row pair][head_dim]
  Pair* dout_rows_;          // [row pair][value_dim]
  Pair* staging_;            // K or V where it cannot be read in place
  Pair* weights_;            // [key][row pair]
  Pair* dscores_;            // [key][row pair]
  Pair* key_pairs_;          // per block [key pair][column_dim]
  Pair* dscore_pairs_;       // [key pair][width]
  Pair* column_scratch_;     // for Engine::columns()
  float* dq_;                // [column_dim][width], where dq is not whole units
};

/// The scales of rows where q, k and v are all bf16.
template <class V, class Engine>
void row_scales_of_pairs(const AttentionParams& params, const RowScalesTask& task, Scratch memory) {
  run_row_scales<V, PairBackward<V, Engine>>(params, task, memory);
}

template <class V, class Engine>
std::size_t row_scales_of_pairs_scratch(const AttentionParams& params) {
  return row_scales_bytes<V, PairBackward<V, Engine>>(params);
}

/// The backward pass where q, k, v and dout are all bf16.
template <class V, class Engine>
void backward_of_pairs(const AttentionParams& params, const BackwardTask& task, Scratch memory) {
  run_backward<V, PairBackward<V, Engine>>(params, task, memory);
}

template <class V, class Engine>
std::size_t backward_of_pairs_scratch(const AttentionParams& params) {
  return backward_bytes<V, PairBackward<V, Engine>>(params);
}

}  // namespace
}  // namespace ladon::cpu
