// The two matrix products of a forward tile, in the compute type: scores^T = K q^T and out^T += V^T
// weights^T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/kv_blocks.inl"
#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/transpose.inl"

namespace ladon::cpu {
namespace {

template <class V>
constexpr std::int64_t kTileRows = V::kLanes* V::kGemmVectors;

/// Transposes the rows of an operand, times `factor`, to `to`, [dim][width]; unused lanes become 0.
/// `scratch` holds kLanes rows of whole vectors.
template <class V>
inline void transpose_rows(const QueryOperand& from, typename V::Scalar factor,
                           typename V::Scalar* scratch, RowBlock<typename V::Scalar> to) {
  const std::int64_t dim = from.dim;
  const std::int64_t stride = round_up(dim, V::kLanes);
  for (std::int64_t first = 0; first < to.stride; first += V::kLanes) {
    for (std::int64_t lane = 0; lane < V::kLanes; ++lane) {
      typename V::Scalar* row = scratch + lane * stride;
      const std::int64_t r = first + lane;
      const bool used = r < from.rows.count;
      if (used) {
        load_row(at(from.operand.data, from.operand.dtype, from.start(r)), from.operand.dtype, dim,
                 row);
      }
      for (std::int64_t i = 0; i < dim; ++i) row[i] = used ? row[i] * factor : 0;
    }
    transpose<V>(dim, scratch, stride, to.at(0, first), to.stride);
  }
}

/// Prefetches rows [begin, end) of K or V for the span's head. Rows of one head are a token apart,
/// which hardware prefetchers do not follow.
template <KvPart kPart>
inline void prefetch_kv(const KeySpan& span, std::int64_t begin, std::int64_t end) {
  const AttentionParams& params = span.params;
  const Operand& operand = kv_operand<kPart>(params);
  const std::int64_t dim = kv_dim<kPart>(params);
  for (std::int64_t key = begin; key < end; ++key) {
    const std::int64_t slot = kv_slot(params.kv_layout, span.sequence, key);
    prefetch_row(operand, kv_row<kPart>(params, span.sequence, span.kv_head, slot), dim);
  }
}

/// Prefetches all keys and values of the span.
inline void prefetch_kv(const KeySpan& span) {
  prefetch_kv<KvPart::kKeys>(span, span.begin, span.end);
  prefetch_kv<KvPart::kValues>(span, span.begin, span.end);
}

/// A tile's share of the prefetching: of the `of` tiles of a strip that work on a block, tile
/// `index` prefetches its part of the next block.
struct PrefetchShare {
  std::int64_t index;
  std::int64_t of;
};

/// Calls product(first, count) for `rows` rows of a product, `step` at a time, and prefetches a
/// share of the next block's keys or values between the steps: a few rows at a time, because a core
/// stalls when it has too many memory requests in flight.
template <KvPart kPart, class Product>
inline void while_prefetching(const KeySpan& span, PrefetchShare share, std::int64_t rows,
                              std::int64_t step, const Product& product) {
  const auto key_at = [&](std::int64_t row) {
    return span.begin + kKeyBlock + kKeyBlock * (share.index * rows + row) / (share.of * rows);
  };
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t end = smaller(first + step, rows);
    prefetch_kv<kPart>(span, key_at(first), smaller(key_at(end), span.last_end));
    product(first, end - first);
  }
}

/// Products of single elements in the compute type; other types are converted block by block.
template <class V>
class ElementProducts {
 public:
  using Scalar = typename V::Scalar;
  static constexpr bool kScaled = true;  // q is multiplied by the scale

  ElementProducts(const AttentionParams& params, std::int64_t tiles, ScratchArena& arena)
      : q_(arena.take<Scalar>(tiles * params.head_dim * kTileRows<V>)),
        key_staging_(arena.take<Scalar>(kKeyBlock * params.head_dim)),
        value_staging_(arena.take<Scalar>(kKeyBlock * spread_stride<Scalar>(params.value_dim))) {}

  void load_queries(const AttentionParams& params, const Sequence& sequence, std::int64_t tile,
                    const QueryRows& rows, std::int64_t width, Scalar* scratch) {
    transpose_rows<V>({params.q, sequence.q, rows, params.head_dim},
                      narrow<Scalar>(params.rules.scale), scratch, {queries(params, tile), width});
  }

  /// Loads the span's keys and values for the products below. With `masks`, some rows may not see
  /// some of them.
  void load_block(const KeySpan& span, bool masks) {
    keys_ = load_kv<KvPart::kKeys>(span, Staging<Scalar>{key_staging_, span.params.head_dim});
    // Values are read by columns, in every tile of the strip: 3 at a time in 16 registers, where
    // staging makes f32 and f64 14 % faster with AVX2. With 6 at a time it costs what it saves.
    const Operand& v = span.params.v;
    const std::int64_t dim = span.params.value_dim;
    values_ = load_kv<KvPart::kValues>(
        span, Staging<Scalar>{.data = value_staging_,
                              .dim = dim,
                              .stride = spread_stride<Scalar>(dim),
                              .always = V::kGemmRows < 6 && rows_collide(v.token_stride, v.dtype)});
    guard_ = masks && !all_finite(values_, span.count(), span.params.value_dim);
  }

  /// scores = K q^T for the first scores.keys keys of the span.
  void score(const KeySpan& span, PrefetchShare share, std::int64_t tile,
             const ScoreTile<Scalar>& scores) {
    const std::int64_t width = scores.width;
    while_prefetching<KvPart::kKeys>(
        span, share, scores.keys, kGemmRowsAtOnce<V>, [&](std::int64_t first, std::int64_t some) {
          gemm<V, Layout::kRows>({.rows = some, .width = width, .depth = span.params.head_dim},
                                 keys_.from(first, 0), {queries(span.params, tile), width},
                                 {scores.data + first * width, width});
        });
  }

  /// out (+)= V^T weights. With `masks`, some weights may be masked (-0.0): they add nothing.
  void add_values(const KeySpan& span, PrefetchShare share, bool masks,
                  const ScoreTile<const Scalar>& weights, ProductTarget<Scalar> out) {
    const std::int64_t width = weights.width;
    while_prefetching<KvPart::kValues>(
        span, share, span.params.value_dim, kGemmRowsAtOnce<V>,
        [&](std::int64_t first, std::int64_t some) {
          gemm_with_guard<V, Layout::kColumns, Guard::kMaskedB>(
              masks && guard_, {.rows = some, .width = width, .depth = weights.keys},
              values_.from(0, first), {weights.data, width}, out.from(first, 0));
        });
  }

 private:
  Scalar* queries(const AttentionParams& params, std::int64_t tile) const {
    return q_ + tile * params.head_dim * kTileRows<V>;
  }

  Scalar* q_;  // [tile][head_dim][width], scaled
  Scalar* key_staging_;
  Scalar* value_staging_;
  RowBlock<const Scalar> keys_;
  RowBlock<const Scalar> values_;
  bool guard_ = false;  // some value is non-finite, and some row may not see it
};

}  // namespace
}  // namespace ladon::cpu
