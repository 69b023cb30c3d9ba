// The two matrix products of a forward tile for bf16, as sums of products of pairs in f32.
//
// Pairs of q and K run along head_dim, so K is read as it lies. Pairs of weights and V run along
// keys: weights are rounded to bf16 as they are paired, and each block of V is paired for the tile,
// which costs 2 % of the products at 64 rows. Twice the terms a step of what f32 does; the weights'
// rounding is all that it costs in accuracy (docs/numerics.md).
//
// An Engine multiplies:
//   kUnit                          the sizes it takes are multiples of this
//   begin()                        before the first product
//   score(span, width, depth, keys, stride, q, scores)
//                                  scores = K q^T; rows of K are `stride` pairs apart
//   add_values(dim, width, pairs, values, weights, room, out, accumulate)
//                                  out (+)= V^T weights; `room` is as large as values
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/forward_tile.inl"
#include "cpu/kernels/table.inl"

namespace ladon::cpu {
namespace {

/// Products by the vector unit's instruction for pairs.
template <class Pairs>
class VectorEngine {
 public:
  using Pair = typename Pairs::Factor;
  static constexpr std::int64_t kUnit = 1;
  static void begin() {}
  static void score(const KeySpan& span, std::int64_t width, std::int64_t depth, const Pair* keys,
                    std::int64_t stride, const Pair* q, float* scores) {
    score_keys<Pairs>(span, width, depth, keys, stride, q, scores);
  }
  static void add_values(std::int64_t dim, std::int64_t width, std::int64_t pairs,
                         const Pair* values, const Pair* weights, Pair*, float* out,
                         bool accumulate) {
    gemm<Pairs, Layout::kColumns>(dim, width, pairs, values, dim, weights, width, out, width,
                                  accumulate);
  }
};

template <class V, class Engine>
class PairProducts {
 public:
  using Pair = std::uint32_t;
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
    for (std::int64_t r = 0; r < width; ++r) {
      if (r >= rows.count) {
        for (std::int64_t i = 0; i < depth_; ++i) q_[i * width + r] = 0;
        continue;
      }
      const std::uint16_t* row = static_cast<const std::uint16_t*>(params.q.data) + sequence.q +
                                 rows.token[r] * params.q.token_stride +
                                 rows.head[r] * params.q.head_stride;
      for (std::int64_t i = 0; i < depth_; ++i) {
        q_[i * width + r] = pair_at(row, i, params.head_dim);
      }
    }
  }

  void score(const KeySpan& span, std::int64_t width, float* scores) {
    const AttentionParams& params = span.params;
    const std::uint16_t* first = row_of<KvPart::kKeys>(span, span.begin);
    // Whole pairs, on the boundaries that the compiler may expect of them.
    const bool as_stored = slots_in_line(params.kv_layout, span.sequence, span.begin, span.end) &&
                           params.head_dim == 2 * depth_ && span.count() % Engine::kUnit == 0 &&
                           params.k.token_stride % 2 == 0 &&
                           reinterpret_cast<std::uintptr_t>(first) % sizeof(Pair) == 0;
    if (as_stored) {
      engine_.score(span, width, depth_, reinterpret_cast<const Pair*>(first),
                    params.k.token_stride / 2, q_, scores);
      return;
    }
    const std::int64_t padded = round_up(span.count(), Engine::kUnit);
    for (std::int64_t key = 0; key < padded; ++key) {
      const bool there = key < span.count();
      const std::uint16_t* row = there ? row_of<KvPart::kKeys>(span, span.begin + key) : nullptr;
      for (std::int64_t i = 0; i < depth_; ++i) {
        keys_[key * depth_ + i] = there ? pair_at(row, i, params.head_dim) : 0;
      }
    }
    engine_.score(span, width, depth_, keys_, depth_, q_, scores);
  }

  /// out (+)= V^T weights. With `masks`, some weights may be marked as masked: they add nothing.
  void add_values(const KeySpan& span, bool masks, std::int64_t width, const float* weights,
                  float* out, bool accumulate) {
    // What is not finite must not meet a masked weight: it is left out, and added row by row.
    const bool guard = masks && !all_finite(span);
    const std::int64_t pairs = round_up(pairs_in(span.count()), Engine::kUnit);
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
      const auto row = [&](std::int64_t i) {
        const std::int64_t key = 2 * pair + i;
        return key < span.count() ? row_of<KvPart::kValues>(span, span.begin + key) : nullptr;
      };
      pair_rows(row(0), row(1), span.params.value_dim, value_dim_, values_ + pair * value_dim_);
      for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
        const auto weight = [&](std::int64_t i) {
          const std::int64_t key = 2 * pair + i;
          return key < span.count() ? load<V>(weights + key * width + lane) : zero<V>();
        };
        store_pairs(weights_ + pair * width + lane, weight(0), weight(1));
      }
    }
    if (guard) {
      for (std::int64_t i = 0; i < pairs * value_dim_; ++i) {
        if (!is_finite(values_[i])) values_[i] &= 0xffff0000U;
        if (!is_finite(values_[i] >> 16U)) values_[i] &= 0xffffU;
      }
    }
    engine_.add_values(value_dim_, width, pairs, values_, weights_, room_, out, accumulate);
    if (guard) add_not_finite(span, width, weights, out);
  }

 private:
  static std::int64_t pairs_in(std::int64_t n) { return (n + 1) / 2; }

  /// Numbers 2i and 2i + 1 of a row; past its end there are zeros.
  static Pair pair_at(const std::uint16_t* row, std::int64_t i, std::int64_t dim) {
    const Pair first = 2 * i < dim ? row[2 * i] : 0U;
    const Pair second = 2 * i + 1 < dim ? row[2 * i + 1] : 0U;
    return first | second << 16U;
  }

  /// Numbers of two rows as pairs. A row that is null, and what is past `dim`, is zeros.
  static void pair_rows(const std::uint16_t* first, const std::uint16_t* second, std::int64_t dim,
                        std::int64_t padded_dim, Pair* to) {
    std::int64_t i = 0;
    if (second != nullptr) {
      for (; i + V::kLanes <= dim; i += V::kLanes) store_pairs(to + i, first + i, second + i);
    }
    for (; i < padded_dim; ++i) {
      const Pair low = first == nullptr || i >= dim ? 0U : first[i];
      const Pair high = second == nullptr || i >= dim ? 0U : second[i];
      to[i] = low | high << 16U;
    }
  }

  template <KvPart kPart>
  static const std::uint16_t* row_of(const KeySpan& span, std::int64_t key) {
    const std::int64_t slot = kv_slot(span.params.kv_layout, span.sequence, key);
    return static_cast<const std::uint16_t*>(kv_operand<kPart>(span.params).data) +
           kv_row<kPart>(span.params, span.sequence, span.kv_head, slot);
  }

  static bool is_finite(Pair low_half) {
    constexpr Pair kExponent = 0x7f80;  // all ones: NaN or infinity
    return (low_half & kExponent) != kExponent;
  }

  static bool all_finite(const KeySpan& span) {
    unsigned finite = 1;
    for (std::int64_t key = span.begin; key < span.end; ++key) {
      const std::uint16_t* row = row_of<KvPart::kValues>(span, key);
      for (std::int64_t i = 0; i < span.params.value_dim; ++i) {
        finite &= static_cast<unsigned>(is_finite(row[i]));
      }
    }
    return finite != 0;
  }

  /// Adds the values that are not finite to the rows that see them.
  static void add_not_finite(const KeySpan& span, std::int64_t width, const float* weights,
                             float* out) {
    for (std::int64_t key = 0; key < span.count(); ++key) {
      const std::uint16_t* row = row_of<KvPart::kValues>(span, span.begin + key);
      for (std::int64_t i = 0; i < span.params.value_dim; ++i) {
        if (is_finite(row[i])) continue;
        float value = 0;
        load_row(row + i, DType::kBF16, 1, &value);
        for (std::int64_t lane = 0; lane < width; ++lane) {
          const float weight = weights[key * width + lane];
          const bool masked = weight == 0 && __builtin_signbit(weight);
          if (!masked) out[i * width + lane] += weight * value;
        }
      }
    }
  }

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

/// The kernels of F32 and F64, with those for bf16 by way of an Engine.
template <class Float, class Double, class Engine>
constexpr KernelTable make_kernel_table_of_pairs() {
  KernelTable table = make_kernel_table<Float, Double>();
  table.bf16.forward_tile = forward_tile_of_pairs<Float, Engine>;
  table.bf16.forward_tile_scratch = forward_tile_of_pairs_scratch<Float, Engine>;
  table.has_bf16 = true;
  return table;
}

}  // namespace
}  // namespace ladon::cpu
