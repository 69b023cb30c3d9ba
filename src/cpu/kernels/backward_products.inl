// The five matrix products of the backward pass, in the compute type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/tile_products.inl"

namespace ladon::cpu {
namespace {

/// Rows of a [token, head, dim] operand as they lie, times `factor`, and transposed; padding and
/// unused rows become 0.
template <class V>
inline void pack_rows(const Operand& operand, std::int64_t offset,
                      const Rows<typename V::Scalar>& rows, std::int64_t width, std::int64_t dim,
                      std::int64_t padded_dim, typename V::Scalar factor, typename V::Scalar* to,
                      typename V::Scalar* to_transposed) {
  for (std::int64_t r = 0; r < width; ++r) {
    typename V::Scalar* row = to + r * padded_dim;
    if (r < rows.count) {
      const std::int64_t start =
          offset + rows.token[r] * operand.token_stride + rows.head[r] * operand.head_stride;
      load_row(at(operand.data, operand.dtype, start), operand.dtype, dim, row);
      for (std::int64_t i = 0; i < dim; ++i) row[i] *= factor;
    }
    for (std::int64_t i = r < rows.count ? dim : 0; i < padded_dim; ++i) row[i] = 0;
  }
  for (std::int64_t r = 0; r < width; r += V::kLanes) {
    transpose<V>(dim, to + r * padded_dim, padded_dim, to_transposed + r, width);
  }
}

/// Products of numbers in the compute type; other types are widened tile by tile and block by
/// block.
template <class V>
class WideBackward {
 public:
  using Scalar = typename V::Scalar;
  static constexpr bool kScaled = true;  // q carries the scale

  WideBackward(const AttentionParams& params, ScratchArena& arena)
      : head_dim_(round_up(params.head_dim, V::kLanes)),
        value_dim_(round_up(params.value_dim, V::kLanes)),
        q_(arena.take<Scalar>(kTileRows<V> * head_dim_)),
        q_transposed_(arena.take<Scalar>(params.head_dim * kTileRows<V>)),
        dout_(arena.take<Scalar>(kTileRows<V> * value_dim_)),
        dout_transposed_(arena.take<Scalar>(params.value_dim * kTileRows<V>)),
        key_staging_(arena.take<Scalar>(kKeyBlock * params.head_dim)),
        value_staging_(arena.take<Scalar>(kKeyBlock * params.value_dim)) {}

  /// What run_backward() does first, with the task's keys. Here they are used as they lie.
  void load_keys(const KeySpan&) {}

  /// Packs q and dout of a tile for any block of keys.
  void load_rows(const AttentionParams& params, const Sequence& sequence, const Rows<Scalar>& rows,
                 std::int64_t width) {
    pack_rows<V>(params.q, sequence.q, rows, width, params.head_dim, head_dim_,
                 narrow<Scalar>(params.rules.scale), q_, q_transposed_);
    pack_rows<V>(params.dout, sequence.dout, rows, width, params.value_dim, value_dim_, Scalar{1},
                 dout_, dout_transposed_);
    finite_ = all_finite(q_, rows.count * head_dim_) && all_finite(dout_, rows.count * value_dim_);
  }

  /// scores = K q^T, dscores = V dout^T.
  void score(const KeySpan& span, std::int64_t width, Scalar* scores, Scalar* dscores) {
    const AttentionParams& params = span.params;
    keys_ = load_block(params.k, span.sequence.k, span.kv_head, span.begin, span.end,
                       params.head_dim, params.head_dim, key_staging_);
    const Block<Scalar> values =
        load_block(params.v, span.sequence.v, span.kv_head, span.begin, span.end, params.value_dim,
                   params.value_dim, value_staging_);
    gemm<V, Layout::kRows>(span.count(), width, params.head_dim, keys_.data, keys_.stride,
                           q_transposed_, width, scores, width, false);
    gemm<V, Layout::kRows>(span.count(), width, params.value_dim, values.data, values.stride,
                           dout_transposed_, width, dscores, width, false);
  }

  /// dv += weights dout, dk += dscores q, dq += K^T dscores, for the span that was scored last.
  /// With `masks`, some weights and dscores may be marked as masked: they add nothing.
  void add_gradients(const KeySpan& span, bool masks, const Rows<Scalar>& rows, std::int64_t width,
                     const Scalar* weights, const Scalar* dscores, Scalar* dv, Scalar* dk,
                     Scalar* dq) {
    const std::int64_t count = span.count();
    const std::int64_t head_dim = span.params.head_dim;
    const bool guard_rows = masks && !finite_;
    gemm_with_guard<V, Layout::kRows, Guard::kMaskedA>(guard_rows, count, value_dim_, rows.count,
                                                       weights, width, dout_, value_dim_, dv,
                                                       value_dim_, true);
    gemm_with_guard<V, Layout::kRows, Guard::kMaskedA>(guard_rows, count, head_dim_, rows.count,
                                                       dscores, width, q_, head_dim_, dk, head_dim_,
                                                       true);
    const bool guard_keys = masks && !all_finite(keys_, count, head_dim);
    gemm_with_guard<V, Layout::kColumns, Guard::kMaskedB>(guard_keys, head_dim, width, count,
                                                          keys_.data, keys_.stride, dscores, width,
                                                          dq, width, true);
  }

 private:
  std::int64_t head_dim_;    // padded to whole vectors
  std::int64_t value_dim_;   // padded to whole vectors
  Scalar* q_;                // [rows][head_dim], scaled
  Scalar* q_transposed_;     // [head_dim][width], scaled
  Scalar* dout_;             // [rows][value_dim]
  Scalar* dout_transposed_;  // [value_dim][width]
  Scalar* key_staging_;
  Scalar* value_staging_;
  Block<Scalar> keys_{nullptr, 0};
  bool finite_ = true;  // q and dout hold only finite numbers
};

}  // namespace
}  // namespace ladon::cpu
