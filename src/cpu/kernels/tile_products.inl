// The two matrix products of a forward tile, in the compute type: scores^T = K q^T and
// out^T += V^T weights^T.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/score_rules.inl"

namespace ladon::cpu {
namespace {

template <class V>
constexpr std::int64_t kTileRows = V::kLanes* V::kGemmVectors;

/// Rows of a [token, head, dim] operand into to[dim][width], times `factor`; unused lanes become 0.
template <class V>
inline void transpose_rows(const Operand& operand, std::int64_t offset,
                           const Rows<typename V::Scalar>& rows, std::int64_t width,
                           std::int64_t dim, typename V::Scalar factor, typename V::Scalar* row,
                           typename V::Scalar* to) {
  for (std::int64_t r = 0; r < rows.count; ++r) {
    const std::int64_t start =
        offset + rows.token[r] * operand.token_stride + rows.head[r] * operand.head_stride;
    load_row(at(operand.data, operand.dtype, start), operand.dtype, dim, row);
    for (std::int64_t i = 0; i < dim; ++i) to[i * width + r] = row[i] * factor;
  }
  for (std::int64_t r = rows.count; r < width; ++r) {
    for (std::int64_t i = 0; i < dim; ++i) to[i * width + r] = 0;
  }
}

/// A block of keys of one KV head.
struct KeySpan {
  const AttentionParams& params;
  const Sequence& sequence;
  std::int64_t kv_head;
  std::int64_t begin;
  std::int64_t end;
  std::int64_t last_end;  // where the keys end that the tile will come to

  std::int64_t count() const { return end - begin; }
};

// Keys that are scored between two requests for later ones: whole steps of the matrix product, be
// they of 3 or 6 rows.
inline constexpr std::int64_t kKeysAtOnce = 12;

/// Asks for keys and values [begin, end) of the span's head before they are needed. Rows of a head
/// lie a whole token apart, which the hardware's prefetchers do not follow.
inline void prefetch_kv(const KeySpan& span, std::int64_t begin, std::int64_t end) {
  const AttentionParams& params = span.params;
  constexpr std::int64_t kLine = 64;
  const auto prefetch = [](const Operand& operand, std::int64_t row, std::int64_t dim) {
    const char* start = static_cast<const char*>(at(operand.data, operand.dtype, row));
    const std::int64_t bytes = dim * static_cast<std::int64_t>(size_of(operand.dtype));
    for (std::int64_t byte = 0; byte < bytes; byte += kLine) __builtin_prefetch(start + byte, 0, 2);
  };
  for (std::int64_t key = begin; key < end; ++key) {
    const std::int64_t slot = kv_slot(params.kv_layout, span.sequence, key);
    prefetch(params.k, kv_row<KvPart::kKeys>(params, span.sequence, span.kv_head, slot),
             params.head_dim);
    prefetch(params.v, kv_row<KvPart::kValues>(params, span.sequence, span.kv_head, slot),
             params.value_dim);
  }
}

/// The same for the keys of the next block that stand where [i, i + count) of this one do.
inline void prefetch_next(const KeySpan& span, std::int64_t i, std::int64_t count) {
  const std::int64_t ahead = span.begin + kKeyBlock + i;
  prefetch_kv(span, ahead, smaller(ahead + count, span.last_end));
}

/// Products of numbers in the compute type; other types are widened block by block.
template <class V>
class WideProducts {
 public:
  using Scalar = typename V::Scalar;
  static constexpr bool kScaled = true;  // q carries the scale

  WideProducts(const AttentionParams& params, ScratchArena& arena)
      : q_(arena.take<Scalar>(params.head_dim * kTileRows<V>)),
        staging_(arena.take<Scalar>(kKeyBlock * larger(params.head_dim, params.value_dim))) {}

  void load_queries(const AttentionParams& params, const Sequence& sequence,
                    const Rows<Scalar>& rows, std::int64_t width, Scalar* row) {
    transpose_rows<V>(params.q, sequence.q, rows, width, params.head_dim,
                      narrow<Scalar>(params.rules.scale), row, q_);
  }

  void score(const KeySpan& span, std::int64_t width, Scalar* scores) {
    const Block<Scalar> keys =
        load_kv<KvPart::kKeys>(span.params, span.sequence, span.kv_head, span.begin, span.end,
                               span.params.head_dim, staging_);
    for (std::int64_t i = 0; i < span.count(); i += kKeysAtOnce) {
      const std::int64_t some = smaller(kKeysAtOnce, span.count() - i);
      prefetch_next(span, i, some);
      gemm<V, Layout::kRows>(some, width, span.params.head_dim, keys.data + i * keys.stride,
                             keys.stride, q_, width, scores + i * width, width, false);
    }
  }

  /// out (+)= V^T weights. With `masks`, some weights may be marked as masked: they add nothing.
  void add_values(const KeySpan& span, bool masks, std::int64_t width, const Scalar* weights,
                  Scalar* out, bool accumulate) {
    const std::int64_t value_dim = span.params.value_dim;
    const Block<Scalar> values = load_kv<KvPart::kValues>(
        span.params, span.sequence, span.kv_head, span.begin, span.end, value_dim, staging_);
    const bool guard = masks && !all_finite(values, span.count(), value_dim);
    gemm_with_guard<V, Layout::kColumns, Guard::kMaskedB>(guard, value_dim, width, span.count(),
                                                          values.data, values.stride, weights,
                                                          width, out, width, accumulate);
  }

 private:
  Scalar* q_;        // [head_dim][width], scaled
  Scalar* staging_;  // K or V block
};

}  // namespace
}  // namespace ladon::cpu
