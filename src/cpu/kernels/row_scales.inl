// What the backward pass normalises the weights of each row with: P = exp(score - shift) * factor.
//
// As a rule shift is the saved lse and factor 1. That fails in a steep row, one whose scores are so
// large that their rounding matters: the forward pass summed q.k in another order, so score - lse
// is wrong by S * eps in either direction, and an f32 lse of 1e12 cannot hold the log of the number
// of keys. The maximum and the sum of a steep row are computed again here, from the scores that
// the backward pass will use, to the last bit. A row is steep if |lse|, the ALiBi term or
// scale * |q| * |k| (norms, over the keys that it sees) passes kSteepScore; that depends on the row
// alone.
//
// Cost: the norms of all rows of q and K, which are a token apart and therefore prefetched; in
// tiles that may have a steep row, q.k once more.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/backward.inl"
#include "cpu/kernels/softmax.inl"

namespace ladon::cpu {
namespace {

// 2^-9 / eps: below it, rounding changes a weight by a fraction of a percent.
template <class Scalar>
constexpr double kSteepScore = sizeof(Scalar) == 4 ? 0x1p14 : 0x1p43;
// 32 * eps, the c * eps of docs/numerics.md.
template <class Scalar>
constexpr double kScoreRounding = sizeof(Scalar) == 4 ? 0x1p-18 : 0x1p-47;

// Keys between a prefetch and the norm: a norm takes about 20 ns, memory about 100.
inline constexpr std::int64_t kNormsAhead = 8;

/// The running softmax of a tile's rows.
template <class Scalar>
struct TileSums {
  alignas(64) Scalar maximum[kMaxRows];
  alignas(64) Scalar denominator[kMaxRows];  // of one block
  alignas(64) Scalar rescale[kMaxRows];
  alignas(64) Scalar key_norm[kMaxRows];  // the largest among the keys that the row sees
  double total[kMaxRows];                 // the denominator over all blocks
};

template <class V, class Products>
class RowScalesRun {
 public:
  using Scalar = typename V::Scalar;

  RowScalesRun(const AttentionParams& params, ScratchArena& arena)
      : params_(params),
        key_norms_(arena.take<Scalar>(params.max_kv_len)),
        row_(arena.take<Scalar>(round_up(params.head_dim, V::kLanes))),
        scores_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        extra_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        keep_(arena.take<Scalar>(kKeyBlock * kTileRows<V>)),
        products_(params, arena) {}

  void run(const RowScalesTask& task) {
    const Sequence& sequence = params_.sequences[task.sequence];
    const KeySpan keys{params_, sequence, task.kv_head, 0, sequence.kv_len};
    Scalar largest_norm = 0;
    for (std::int64_t key = 0; key < sequence.kv_len; ++key) {
      const std::int64_t ahead = key + kNormsAhead;
      prefetch_kv<KvPart::kKeys>(keys, ahead, smaller(ahead + 1, keys.end));
      key_norms_[key] =
          norm(params_.k, kv_row<KvPart::kKeys>(params_, sequence, task.kv_head, key));
      // Written so that a NaN stays: it may belong to a key that no row sees.
      if (!(key_norms_[key] <= largest_norm)) largest_norm = key_norms_[key];
    }
    products_.load_keys({params_, sequence, task.kv_head, 0, 0});  // block by block
    const std::int64_t row_count = sequence.query_len * params_.group;
    for (std::int64_t row = 0; row < row_count; row += kTileRows<V>) {
      set_rows(rows_, params_, sequence,
               {.first_head = task.kv_head * params_.group,
                .heads_per_token = params_.group,
                .begin = row,
                .count = smaller(kTileRows<V>, row_count - row)},
               {0, sequence.kv_len});
      const QueryOperand queries{params_.q, sequence.q, rows_, params_.head_dim};
      for (std::int64_t r = 0; r < rows_.count; ++r) {
        prefetch_row(params_.q, queries.start(r), params_.head_dim);
      }
      bool may_be_steep = false;
      for (std::int64_t r = 0; r < rows_.count; ++r) {
        const double lse = saved_lse(sequence, r);
        // exp(score - inf) makes all weights of a row that sees no key 0.
        store(task, r, lse == -__builtin_inf() ? __builtin_inf() : lse, 1);
        query_norms_[r] = norm(params_.q, queries.start(r));
        may_be_steep = may_be_steep || is_steep(sequence, r, lse, largest_norm);
      }
      if (may_be_steep && rows_.some_end != 0) rescale_tile(task, keys);
    }
  }

 private:
  Scalar norm(const Operand& operand, std::int64_t start) const {
    load_row(at(operand.data, operand.dtype, start), operand.dtype, params_.head_dim, row_);
    return static_cast<Scalar>(
        __builtin_sqrt(static_cast<double>(inner_product<V>(row_, row_, params_.head_dim))));
  }

  double saved_lse(const Sequence& sequence, std::int64_t r) const {
    return load_lse(params_.lse, sequence.lse + rows_.token[r] * params_.lse.token_stride +
                                     rows_.head[r] * params_.lse.head_stride);
  }

  /// An upper bound of the row's scores; NaN and infinity where norms overflow.
  double score_bound(const Sequence& sequence, std::int64_t r, Scalar key_norm) const {
    double bound = absolute(params_.rules.scale) * static_cast<double>(query_norms_[r]) *
                   static_cast<double>(key_norm);
    if (params_.rules.alibi_slopes.data != nullptr) {
      const double reach =
          static_cast<double>(larger(rows_.token[r] + sequence.position_offset, sequence.kv_len));
      bound += absolute(head_element(params_.rules.alibi_slopes, rows_.head[r])) * reach;
    }
    return bound;
  }

  bool is_steep(const Sequence& sequence, std::int64_t r, double lse, Scalar key_norm) const {
    if (!(absolute(lse) < __builtin_inf()))
      return false;  // nothing seen, or a NaN among the scores
    return absolute(lse) > kSteepScore<Scalar> ||
           !(score_bound(sequence, r, key_norm) <= kSteepScore<Scalar>);
  }

  /// Computes maxima and sums of a tile, and stores those of its steep rows.
  void rescale_tile(const RowScalesTask& task, const KeySpan& keys) {
    const std::int64_t width = round_up(rows_.count, V::kLanes);
    for (std::int64_t r = 0; r < width; ++r) {
      sums_.maximum[r] = MathConstants<Scalar>::kLowest;
      sums_.key_norm[r] = 0;
      sums_.total[r] = 0;
    }
    products_.load_rows(params_, keys.sequence, rows_, width);
    for_each_key_block(keys, rows_, [&](const KeySpan& span) { add_block(span, width); });
    for (std::int64_t r = 0; r < rows_.count; ++r) {
      const double lse = saved_lse(keys.sequence, r);
      if (sums_.total[r] == 0 || !is_steep(keys.sequence, r, lse, sums_.key_norm[r])) continue;
      double top = static_cast<double>(sums_.maximum[r]);
      double total = sums_.total[r];
      if (params_.rules.sinks.data != nullptr) {
        const double sink = head_element(params_.rules.sinks, rows_.head[r]);
        const double maximum = top;
        top = maximum < sink ? sink : maximum;
        total = total * __builtin_exp(maximum - top) + __builtin_exp(sink - top);
      }
      // An lse that is larger than rounding explains counts keys that are not here.
      const double elsewhere = lse - (top + __builtin_log(total));
      const double rounding =
          kScoreRounding<Scalar> *
          (1 + absolute(lse) + score_bound(keys.sequence, r, sums_.key_norm[r]));
      const double share = elsewhere > rounding ? __builtin_exp(-elsewhere) : 1;
      store(task, r, top, share / total);
    }
  }

  void add_block(const KeySpan& span, std::int64_t width) {
    const std::int64_t count = span.count();
    products_.score(span, {scores_, nullptr, width});
    set_block(block_, params_, span.sequence, rows_, {span.begin, span.end},
              RuleScratch<Scalar>{extra_, keep_, {.row_step = 1, .key_step = width}});
    for (std::int64_t r = 0; r < width; ++r) sums_.denominator[r] = 0;
    softmax_block<V, Products::kScaled>(block_, narrow<Scalar>(params_.rules.scale),
                                        {scores_, count, width}, {sums_.maximum, sums_.denominator},
                                        sums_.rescale);
    for (std::int64_t r = 0; r < width; ++r) {
      sums_.total[r] = sums_.total[r] * static_cast<double>(sums_.rescale[r]) +
                       static_cast<double>(sums_.denominator[r]);
    }
    const V masked = broadcast<V>(static_cast<Scalar>(-0.0));
    for (std::int64_t lane = 0; lane < width; lane += V::kLanes) {
      V largest_norm = load<V>(sums_.key_norm + lane);
      for (std::int64_t i = 0; i < count; ++i) {
        const auto hidden = identical(load<V>(scores_ + i * width + lane), masked);
        const V seen = select(hidden, zero<V>(), broadcast<V>(key_norms_[span.begin + i]));
        largest_norm = max(seen, largest_norm);
      }
      cpu::store(sums_.key_norm + lane, largest_norm);
    }
  }

  void store(const RowScalesTask& task, std::int64_t r, double shift, double factor) const {
    const std::int64_t row = task.scales.row(params_, task.sequence, rows_.token[r], rows_.head[r]);
    static_cast<Scalar*>(task.scales.shift)[row] = static_cast<Scalar>(shift);
    static_cast<Scalar*>(task.scales.factor)[row] = static_cast<Scalar>(factor);
  }

  static double absolute(double x) { return x < 0 ? -x : x; }

  const AttentionParams& params_;
  Scalar* key_norms_;  // [kv_len]
  Scalar* row_;
  Scalar* scores_;
  Scalar* extra_;
  Scalar* keep_;
  Products products_;
  QueryRows rows_;
  BlockRules<Scalar> block_;
  TileSums<Scalar> sums_;
  Scalar query_norms_[kMaxRows];
};

template <class V, class Products>
void run_row_scales(const AttentionParams& params, const RowScalesTask& task, Scratch memory) {
  ScratchArena arena(memory);
  RowScalesRun<V, Products>(params, arena).run(task);
}

template <class V, class Products>
std::size_t row_scales_bytes(const AttentionParams& params) {
  ScratchArena arena;
  const RowScalesRun<V, Products> run(params, arena);
  return arena.used();
}

template <class V>
void row_scales(const AttentionParams& params, const RowScalesTask& task, Scratch memory) {
  run_row_scales<V, ElementBackward<V>>(params, task, memory);
}

template <class V>
std::size_t row_scales_scratch(const AttentionParams& params) {
  return row_scales_bytes<V, ElementBackward<V>>(params);
}

}  // namespace
}  // namespace ladon::cpu
