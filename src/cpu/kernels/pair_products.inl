// The two matrix products of a forward tile for bf16, as sums of products of pairs in f32.
//
// Pairs of q and K run along head_dim, so K is read as it lies. Pairs of weights and V run along
// keys: weights are rounded to bf16 as they are paired, and each block of V is paired for the tile,
// which costs 2 % of the products at 64 rows. Twice the terms a step of what f32 does; the weights'
// rounding is all that it costs in accuracy (docs/numerics.md).
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

  PairProducts(const AttentionParams& params, ScratchArena& arena)
      : depth_(round_up(pairs_in(params.head_dim), Engine::kUnit)),
        value_dim_(round_up(params.value_dim, Engine::kUnit)),
        q_(arena.take<Pair>(depth_ * kTileRows<V>)),
        keys_(arena.take<Pair>(kKeyBlock * depth_)),
        values_(arena.take<Pair>(kKeyBlock / 2 * value_dim_)),
        room_(arena.take<Pair>(Engine::kUnit == 1 ? 0 : kKeyBlock / 2 * value_dim_)),
        weights_(arena.take<Pair>(kKeyBlock / 2 * kTileRows<V>)) {
    static_assert(kKeyBlock % Engine::kUnit == 0 && kKeyBlock / 2 % Engine::kUnit == 0);
  }

  void load_queries(const AttentionParams& params, const Sequence& sequence,
                    const Rows<float>& rows, std::int64_t width, float*) {
    engine_.begin();
    pair_along_rows(params.q, sequence.q, rows, width, params.head_dim, depth_, q_);
  }

  void score(const KeySpan& span, std::int64_t width, float* scores) {
    const PairMatrix keys = pairs_as_stored<KvPart::kKeys, Engine::kUnit>(span, depth_, keys_);
    constexpr std::int64_t kStep = round_up(kKeysAtOnce, Engine::kUnit);
    for (std::int64_t i = 0; i < span.count(); i += kStep) {
      const std::int64_t some = smaller(kStep, span.count() - i);
      prefetch_next(span, i, some);
      engine_.multiply(round_up(some, Engine::kUnit), width, depth_,
                       {keys.data + i * keys.stride, keys.stride}, {q_, width}, scores + i * width,
                       width, false);
    }
  }

  /// out (+)= V^T weights. With `masks`, some weights may be marked as masked: they add nothing.
  void add_values(const KeySpan& span, bool masks, std::int64_t width, const float* weights,
                  float* out, bool accumulate) {
    const std::int64_t dim = span.params.value_dim;
    const std::int64_t pairs = round_up(pairs_in(span.count()), Engine::kUnit);
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      pair_rows(row_of<KvPart::kValues>(span, 2 * pair),
                row_of<KvPart::kValues>(span, 2 * pair + 1), dim, value_dim_,
                values_ + pair * value_dim_);
    }
    pair_weights(weights, span.count(), width, pairs, weights_);
    bool guard = false;
    for (std::int64_t key = 0; masks && !guard && key < span.count(); ++key) {
      guard = !all_finite(row_of<KvPart::kValues>(span, key), dim);
    }
    if (guard) clear_not_finite(values_, pairs * value_dim_);
    engine_.multiply_columns(value_dim_, width, pairs, values_, weights_, room_, out, accumulate);
    for (std::int64_t key = 0; guard && key < span.count(); ++key) {
      add_not_finite(row_of<KvPart::kValues>(span, key), dim, weights + key * width, 1, width, out,
                     width, 1);
    }
  }

 private:
  Engine engine_;
  std::int64_t depth_;      // pairs of a row of q or K, padded
  std::int64_t value_dim_;  // padded
  Pair* q_;                 // [depth][width]
  Pair* keys_;              // [key][depth], where K cannot be used as it lies
  Pair* values_;            // [key pair][value_dim]
  Pair* room_;              // for the engine
  Pair* weights_;           // [key pair][width]
};

/// Forward tiles whose q, k and v are all bf16.
template <class V, class Engine>
void forward_tile_of_pairs(const AttentionParams& params, const ForwardTask& task, void* memory) {
  run_forward_tile<V, PairProducts<V, Engine>>(params, task, memory);
}

template <class V, class Engine>
std::size_t forward_tile_of_pairs_scratch(const AttentionParams& params) {
  return forward_tile_bytes<V, PairProducts<V, Engine>>(params);
}

}  // namespace
}  // namespace ladon::cpu
