// The five matrix products of the backward pass, in the compute type.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/tile_products.inl"

namespace ladon::cpu {
namespace {

/// Copies the rows of an operand, times `factor`, to `to`, [row][padded dim], and transposes them
/// to `to_transposed`, [dim][width]; padding and unused rows become 0.
template <class V>
inline void pack_rows(const QueryOperand& from, typename V::Scalar factor,
                      RowBlock<typename V::Scalar> to, RowBlock<typename V::Scalar> to_transposed) {
  const std::int64_t width = to_transposed.stride;
  for (std::int64_t r = 0; r < width; ++r) {
    typename V::Scalar* row = to.row(r);
    const bool used = r < from.rows.count;
    if (used) {
      load_row(at(from.operand.data, from.operand.dtype, from.start(r)), from.operand.dtype,
               from.dim, row);
      for (std::int64_t i = 0; i < from.dim; ++i) row[i] *= factor;
    }
    for (std::int64_t i = used ? from.dim : 0; i < to.stride; ++i) row[i] = 0;
  }
  for (std::int64_t r = 0; r < width; r += V::kLanes) {
    transpose<V>(from.dim, to.row(r), to.stride, to_transposed.at(0, r), width);
  }
}

/// The scores of a tile of rows with a block of keys and their gradients, [key][width] each.
/// score_gradients() replaces scores and dP by weights P and dS.
template <class Scalar>
struct BackwardScores {
  Scalar* scores = nullptr;   // scores, then weights
  Scalar* dscores = nullptr;  // dP, then dS; null where scores alone are wanted
  std::int64_t width = 0;
};

/// Where the gradients of a block of keys and of a tile of rows are accumulated.
template <class Scalar>
struct GradientSums {
  Scalar* dk = nullptr;  // [key][head_dim], padded to whole vectors
  Scalar* dv = nullptr;  // [key][value_dim], padded to whole vectors
  Scalar* dq = nullptr;  // [head_dim][width]
};

/// Products of single elements in the compute type; other types are converted tile by tile and
/// block by block.
template <class V>
class ElementBackward {
 public:
  using Scalar = typename V::Scalar;
  static constexpr bool kScaled = true;  // q is multiplied by the scale

  ElementBackward(const AttentionParams& params, ScratchArena& arena)
      : head_dim_(round_up(params.head_dim, V::kLanes)),
        value_dim_(round_up(params.value_dim, V::kLanes)),
        q_(arena.take<Scalar>(kTileRows<V> * head_dim_)),
        q_transposed_(arena.take<Scalar>(params.head_dim * kTileRows<V>)),
        dout_(arena.take<Scalar>(kTileRows<V> * value_dim_)),
        dout_transposed_(arena.take<Scalar>(params.value_dim * kTileRows<V>)),
        key_staging_(arena.take<Scalar>(kBackwardKeys * spread_stride<Scalar>(params.head_dim))),
        value_staging_(arena.take<Scalar>(kBackwardKeys * params.value_dim)) {}

  /// Called first, with the task's keys, up to kBackwardKeys: every tile of rows reads them, and
  /// keys by columns too. With an empty span, each block is loaded when it is scored.
  void load_keys(const KeySpan& task) {
    const AttentionParams& params = task.params;
    first_key_ = task.begin;
    end_key_ = task.end;
    task_keys_ = load_kv<KvPart::kKeys>(
        task, Staging<Scalar>{.data = key_staging_,
                              .dim = params.head_dim,
                              .stride = spread_stride<Scalar>(params.head_dim),
                              .always = rows_collide(params.k.token_stride, params.k.dtype)});
    task_values_ =
        load_kv<KvPart::kValues>(task, Staging<Scalar>{value_staging_, params.value_dim});
  }

  /// Packs q and dout of a tile for any block of keys.
  void load_rows(const AttentionParams& params, const Sequence& sequence, const QueryRows& rows,
                 std::int64_t width) {
    pack_rows<V>({params.q, sequence.q, rows, params.head_dim}, narrow<Scalar>(params.rules.scale),
                 {q_, head_dim_}, {q_transposed_, width});
    pack_rows<V>({params.dout, sequence.dout, rows, params.value_dim}, Scalar{1},
                 {dout_, value_dim_}, {dout_transposed_, width});
    finite_ = all_finite(q_, rows.count * head_dim_) && all_finite(dout_, rows.count * value_dim_);
  }

  /// scores = K q^T, dscores = V dout^T where they are wanted.
  void score(const KeySpan& span, const BackwardScores<Scalar>& tile) {
    const AttentionParams& params = span.params;
    const std::int64_t count = span.count();
    if (span.begin < first_key_ || span.end > end_key_) load_keys(span);
    keys_ = task_keys_.from(span.begin - first_key_, 0);
    gemm<V, Layout::kRows>({.rows = count, .width = tile.width, .depth = params.head_dim}, keys_,
                           {q_transposed_, tile.width}, {tile.scores, tile.width});
    if (tile.dscores == nullptr) return;
    gemm<V, Layout::kRows>({.rows = count, .width = tile.width, .depth = params.value_dim},
                           task_values_.from(span.begin - first_key_, 0),
                           {dout_transposed_, tile.width}, {tile.dscores, tile.width});
  }

  /// dv += weights dout, dk += dscores q, dq += K^T dscores, for the span that was scored last.
  /// With `masks`, some weights and dscores may be masked (-0.0): they add nothing.
  void add_gradients(const KeySpan& span, bool masks, const QueryRows& rows,
                     const BackwardScores<Scalar>& tile, const GradientSums<Scalar>& sums) {
    const std::int64_t count = span.count();
    const std::int64_t head_dim = span.params.head_dim;
    const bool guard_rows = masks && !finite_;
    gemm_with_guard<V, Layout::kRows, Guard::kMaskedA>(
        guard_rows, {.rows = count, .width = value_dim_, .depth = rows.count},
        {tile.scores, tile.width}, {dout_, value_dim_},
        {.data = sums.dv, .stride = value_dim_, .accumulate = true});
    gemm_with_guard<V, Layout::kRows, Guard::kMaskedA>(
        guard_rows, {.rows = count, .width = head_dim_, .depth = rows.count},
        {tile.dscores, tile.width}, {q_, head_dim_},
        {.data = sums.dk, .stride = head_dim_, .accumulate = true});
    const bool guard_keys = masks && !all_finite(keys_, count, head_dim);
    gemm_with_guard<V, Layout::kColumns, Guard::kMaskedB>(
        guard_keys, {.rows = head_dim, .width = tile.width, .depth = count}, keys_,
        {tile.dscores, tile.width}, {.data = sums.dq, .stride = tile.width, .accumulate = true});
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
  std::int64_t first_key_ = 0;  // of those that are loaded
  std::int64_t end_key_ = 0;
  RowBlock<const Scalar> task_keys_;
  RowBlock<const Scalar> task_values_;
  RowBlock<const Scalar> keys_;  // of the span that was scored last
  bool finite_ = true;           // all elements of q and dout are finite
};

}  // namespace
}  // namespace ladon::cpu
