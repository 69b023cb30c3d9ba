// The two matrix products of a forward tile for bf16, as sums of products of pairs in f32.
//
// Pairs of q and K run along head_dim, so that K is read in place. Pairs of weights and V run along
// keys: weights are rounded to bf16 as they are paired, and each block of V is paired once for the
// strip. A step takes twice the terms of f32; the only cost in accuracy is the rounding of the
// weights (docs/numerics.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/forward_tile.inl"
#include "cpu/kernels/pairs.inl"

namespace ladon::cpu {
namespace {

template <class V, class Engine>
class PairProducts {
 public:
  static constexpr bool kScaled = false;  // scale * q would be rounded

  PairProducts(const AttentionParams& params, std::int64_t tiles, ScratchArena& arena)
      : depth_(round_up(pairs_in(params.head_dim), Engine::kUnit)),
        value_dim_(round_up(params.value_dim, Engine::kUnit)),
        q_(arena.take<Pair>(tiles * depth_ * kTileRows<V>)),
        keys_staging_(arena.take<Pair>(kKeyBlock * depth_)),
        values_(arena.take<Pair>(kKeyBlock / 2 * value_dim_)),
        column_scratch_(arena.take<Pair>(Engine::kUnit == 1 ? 0 : kKeyBlock / 2 * value_dim_)),
        weights_(arena.take<Pair>(kKeyBlock / 2 * kTileRows<V>)) {
    static_assert(kKeyBlock % Engine::kUnit == 0 && kKeyBlock / 2 % Engine::kUnit == 0 &&
                  Engine::kRowsAtOnce % Engine::kUnit == 0);
  }

  void load_queries(const AttentionParams& params, const Sequence& sequence, std::int64_t tile,
                    const QueryRows& rows, std::int64_t width, float*) {
    if (tile == 0) engine_.begin();
    pair_along_rows({params.q, sequence.q, rows, params.head_dim}, width, depth_, queries(tile));
  }

  void load_block(const KeySpan& span, bool masks) {
    keys_ = pairs_as_stored<KvPart::kKeys, Engine::kUnit>(span, depth_, keys_staging_);
    const auto row_at = [&](std::int64_t key) { return row_of<KvPart::kValues>(span, key); };
    const std::int64_t dim = span.params.value_dim;
    const std::int64_t pairs = round_up(pairs_in(span.count()), Engine::kUnit);
    finite_ = true;
    if (masks) {
      finite_ = pair_finite(pairs, dim, value_dim_, row_at, values_);
    } else {
      pair_two_by_two(pairs, dim, value_dim_, row_at, values_);
    }
    columns_ = engine_.columns(value_dim_, pairs, values_, column_scratch_);
  }

  void score(const KeySpan& span, PrefetchShare share, std::int64_t tile,
             const ScoreTile<float>& scores) {
    const std::int64_t width = scores.width;
    while_prefetching<KvPart::kKeys>(
        span, share, round_up(scores.keys, Engine::kUnit), Engine::kRowsAtOnce,
        [&](std::int64_t first, std::int64_t some) {
          engine_.multiply({.rows = some, .width = width, .depth = depth_}, keys_.from(first, 0),
                           {queries(tile), width}, {scores.data + first * width, width});
        });
  }

  void add_values(const KeySpan& span, PrefetchShare share, bool,
                  const ScoreTile<const float>& weights, ProductTarget<float> out) {
    const std::int64_t width = weights.width;
    const std::int64_t pairs = round_up(pairs_in(weights.keys), Engine::kUnit);
    pair_weights(weights, pairs, weights_);
    while_prefetching<KvPart::kValues>(
        span, share, value_dim_, Engine::kRowsAtOnce, [&](std::int64_t first, std::int64_t some) {
          engine_.multiply_columns(first, {.rows = some, .width = width, .depth = pairs}, columns_,
                                   {weights_, width}, out.from(first, 0));
        });
    for (std::int64_t key = 0; !finite_ && key < weights.keys; ++key) {
      add_not_finite({row_of<KvPart::kValues>(span, key), span.params.value_dim},
                     {.data = weights.data + key * width, .stride = 1, .count = width},
                     {.data = out.data, .row_step = width, .weight_step = 1});
    }
  }

 private:
  Pair* queries(std::int64_t tile) const { return q_ + tile * depth_ * kTileRows<V>; }

  Engine engine_;
  std::int64_t depth_;      // pairs of a row of q or K, padded
  std::int64_t value_dim_;  // padded
  Pair* q_;                 // [tile][depth][width]
  Pair* keys_staging_;      // [key][depth], where K cannot be read in place
  Pair* values_;            // [key pair][value_dim]
  Pair* column_scratch_;    // for Engine::columns()
  Pair* weights_;           // [key pair][width]
  PairMatrix keys_;
  PairMatrix columns_;
  bool finite_ = true;  // all values of the block are finite, or all rows see them
};

/// Forward tiles whose q, k and v are all bf16.
template <class V, class Engine>
void forward_tile_of_pairs(const AttentionParams& params, const ForwardTask& task, Scratch memory) {
  run_forward_tile<V, PairProducts<V, Engine>>(params, task, memory);
}

template <class V, class Engine>
std::size_t forward_tile_of_pairs_scratch(const AttentionParams& params) {
  return forward_tile_bytes<V, PairProducts<V, Engine>>(params);
}

}  // namespace
}  // namespace ladon::cpu
