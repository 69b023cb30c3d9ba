// The two matrix products of a forward tile, in the compute type: scores^T = K q^T and
// out^T += V^T weights^T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/score_rules.inl"
#include "cpu/kernels/transpose.inl"

namespace ladon::cpu {
namespace {

template <class V>
constexpr std::int64_t kTileRows = V::kLanes* V::kGemmVectors;

/// Rows of a [token, head, dim] operand into to[dim][width], times `factor`; unused lanes become 0.
/// `room` holds kLanes rows of whole vectors.
template <class V>
inline void transpose_rows(const Operand& operand, std::int64_t offset,
                           const Rows<typename V::Scalar>& rows, std::int64_t width,
                           std::int64_t dim, typename V::Scalar factor, typename V::Scalar* room,
                           typename V::Scalar* to) {
  const std::int64_t stride = round_up(dim, V::kLanes);
  for (std::int64_t first = 0; first < width; first += V::kLanes) {
    for (std::int64_t lane = 0; lane < V::kLanes; ++lane) {
      typename V::Scalar* row = room + lane * stride;
      const std::int64_t r = first + lane;
      if (r < rows.count) {
        const std::int64_t start =
            offset + rows.token[r] * operand.token_stride + rows.head[r] * operand.head_stride;
        load_row(at(operand.data, operand.dtype, start), operand.dtype, dim, row);
      }
      for (std::int64_t i = 0; i < dim; ++i) row[i] = r < rows.count ? row[i] * factor : 0;
    }
    transpose<V>(dim, room, stride, to + first, width);
  }
}

/// A block of keys of one KV head.
struct KeySpan {
  const AttentionParams& params;
  const Sequence& sequence;
  std::int64_t kv_head;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t last_end;  // where the keys end that the task will come to

  std::int64_t count() const { return end - begin; }
};

/// Asks for one operand's rows [begin, end) of the span's head before they are needed. Rows of a
/// head lie a whole token apart, which the hardware's prefetchers do not follow.
template <KvPart kPart>
inline void prefetch_kv(const KeySpan& span, std::int64_t begin, std::int64_t end) {
  const AttentionParams& params = span.params;
  const Operand& operand = kv_operand<kPart>(params);
  const std::int64_t dim = kPart == KvPart::kKeys ? params.head_dim : params.value_dim;
  for (std::int64_t key = begin; key < end; ++key) {
    const std::int64_t slot = kv_slot(params.kv_layout, span.sequence, key);
    prefetch_row(operand, kv_row<kPart>(params, span.sequence, span.kv_head, slot), dim);
  }
}

/// The same for all keys and values of the span.
inline void prefetch_kv(const KeySpan& span) {
  prefetch_kv<KvPart::kKeys>(span, span.begin, span.end);
  prefetch_kv<KvPart::kValues>(span, span.begin, span.end);
}

/// Tiles of a strip take turns at a block; each asks for its share of the next one.
struct Turn {
  std::int64_t index;
  std::int64_t of;
};

/// Calls product(first, count) for `rows` rows of a product, `step` at a time, and asks for the
/// turn's share of the next block's keys or values on the way: a few rows before each step, because
/// a core has only so many requests under way and waits when there are more.
template <KvPart kPart, class Product>
inline void while_fetching(const KeySpan& span, Turn turn, std::int64_t rows, std::int64_t step,
                           const Product& product) {
  const auto key_at = [&](std::int64_t row) {
    return span.begin + kKeyBlock + kKeyBlock * (turn.index * rows + row) / (turn.of * rows);
  };
  for (std::int64_t first = 0; first < rows; first += step) {
    const std::int64_t end = smaller(first + step, rows);
    prefetch_kv<kPart>(span, key_at(first), smaller(key_at(end), span.last_end));
    product(first, end - first);
  }
}

/// Products of numbers in the compute type; other types are widened block by block.
template <class V>
class WideProducts {
 public:
  using Scalar = typename V::Scalar;
  static constexpr bool kScaled = true;  // q carries the scale

  WideProducts(const AttentionParams& params, std::int64_t tiles, ScratchArena& arena)
      : q_(arena.take<Scalar>(tiles * params.head_dim * kTileRows<V>)),
        key_staging_(arena.take<Scalar>(kKeyBlock * params.head_dim)),
        value_staging_(arena.take<Scalar>(kKeyBlock * params.value_dim)) {}

  void load_queries(const AttentionParams& params, const Sequence& sequence, std::int64_t tile,
                    const Rows<Scalar>& rows, std::int64_t width, Scalar* room) {
    transpose_rows<V>(params.q, sequence.q, rows, width, params.head_dim,
                      narrow<Scalar>(params.rules.scale), room, queries(params, tile));
  }

  /// Makes the span's keys and values those that the products below take. With `masks`, some rows
  /// may not see some of them.
  void load_block(const KeySpan& span, bool masks) {
    keys_ = load_kv<KvPart::kKeys>(span.params, span.sequence, span.kv_head, span.begin, span.end,
                                   span.params.head_dim, key_staging_);
    values_ = load_kv<KvPart::kValues>(span.params, span.sequence, span.kv_head, span.begin,
                                       span.end, span.params.value_dim, value_staging_);
    guard_ = masks && !all_finite(values_, span.count(), span.params.value_dim);
  }

  /// scores = K q^T for the first `count` keys of the span.
  void score(const KeySpan& span, Turn turn, std::int64_t tile, std::int64_t count,
             std::int64_t width, Scalar* scores) {
    while_fetching<KvPart::kKeys>(
        span, turn, count, kGemmRowsAtOnce<V>, [&](std::int64_t first, std::int64_t some) {
          gemm<V, Layout::kRows>(
              some, width, span.params.head_dim, keys_.data + first * keys_.stride, keys_.stride,
              queries(span.params, tile), width, scores + first * width, width, false);
        });
  }

  /// out (+)= V^T weights. With `masks`, some weights may be marked as masked: they add nothing.
  void add_values(const KeySpan& span, Turn turn, bool masks, std::int64_t count,
                  std::int64_t width, const Scalar* weights, Scalar* out, bool accumulate) {
    while_fetching<KvPart::kValues>(span, turn, span.params.value_dim, kGemmRowsAtOnce<V>,
                                    [&](std::int64_t first, std::int64_t some) {
                                      gemm_with_guard<V, Layout::kColumns, Guard::kMaskedB>(
                                          masks && guard_, some, width, count, values_.data + first,
                                          values_.stride, weights, width, out + first * width,
                                          width, accumulate);
                                    });
  }

 private:
  Scalar* queries(const AttentionParams& params, std::int64_t tile) const {
    return q_ + tile * params.head_dim * kTileRows<V>;
  }

  Scalar* q_;  // of each tile [head_dim][width], scaled
  Scalar* key_staging_;
  Scalar* value_staging_;
  Block<Scalar> keys_{nullptr, 0};
  Block<Scalar> values_{nullptr, 0};
  bool guard_ = false;  // some value is not finite, and some row may not see it
};

}  // namespace
}  // namespace ladon::cpu
