// The products of decoding in the compute type, and what every kind of products is given.
#pragma once

#include <cstdint>

#include "cpu/kernels/dot.inl"
#include "cpu/kernels/gemm.inl"
#include "cpu/kernels/key_rows.inl"
#include "cpu/kernels/weighted_rows.inl"

namespace ladon::cpu {
namespace {

// Most rows of one KV head. Up to here a dot product per row and key (head_dim / lanes FMAs and a
// horizontal sum) beats a tile whose lanes are mostly empty (head_dim FMAs per key, whatever the
// number of rows).
inline constexpr std::int64_t kDecodeRows = 8;

/// One block's weighted sum of values for the rows of one KV head: operands and target.
template <class V>
struct WeightedBlock {
  using Scalar = typename V::Scalar;
  const AttentionParams& params;
  const Sequence& sequence;
  std::int64_t first_kv_head;  // of the task
  std::int64_t head;           // counted from first_kv_head
  const KeyRows& keys;
  std::int64_t rows;
  RowBlock<const Scalar> weights;  // [row][key]
  bool masks;                      // some weights may be masked
  RowsAhead ahead;                 // keys of the next block, to prefetch
  Scalar* staging;                 // holds a block of values
  RowBlock<Scalar> out;            // [row][value_dim], padded
};

/// q.k as dot products with sums of this type.
template <class Sums>
struct DotScores {
  /// How many keys score() takes at a time.
  static std::int64_t keys_at_once(std::int64_t rows) {
    return rows == 1 ? kDotKeysOfOneRow : kDotKeys;
  }
  /// Scores of size.rows rows and size.width keys, at most keys_at_once(); size.depth is the length
  /// of a query in factors.
  template <DType kStored, class Scalar>
  static void score(ProductSize size, RowBlock<Scalar> q, StoredRows keys, Scalar* scores) {
    dot_products<Sums, kStored>(
        size, {reinterpret_cast<const typename Sums::Factor*>(q.data), q.stride}, keys,
        {reinterpret_cast<typename Sums::Scalar*>(scores), kKeyBlock});
  }
};

/// What a kind of products wants to know of a row's weights before it multiplies them: nothing.
struct NoWeightScale {
  template <class V>
  struct Watch {
    void add(V) {}
    NoWeightScale result() const { return {}; }
  };
};

/// Products of single elements in the compute type. Queries are multiplied by the scale.
template <class V>
struct ElementDecode : DotScores<V> {
  using Scalar = typename V::Scalar;
  using WeightScale = NoWeightScale;
  static constexpr bool kScaled = true;  // load_query() multiplies by the scale
  static constexpr bool kStreams = true;

  /// Calls function(StoredAs) with the type as which dot products read keys.
  template <class Function>
  static void with_keys(DType dtype, const Function& function) {
    with_stored<V>(dtype, function);
  }
  /// The length of a query in factors.
  static std::int64_t length(std::int64_t head_dim) { return head_dim; }
  /// Returns the factor that the query's products are to be multiplied by.
  static Scalar load_query(const AttentionParams& params, std::int64_t start,
                           std::int64_t padded_dim, Scalar* to) {
    load_row(at(params.q.data, params.q.dtype, start), params.q.dtype, params.head_dim, to);
    const Scalar scale = narrow<Scalar>(params.rules.scale);
    for (std::int64_t i = 0; i < params.head_dim; ++i) to[i] *= scale;
    for (std::int64_t i = params.head_dim; i < padded_dim; ++i) to[i] = 0;
    return 1;
  }
  /// The scores that score() has stored.
  static V load_scores(const Scalar* scores) { return load<V>(scores); }

  /// Masked values add nothing, even if they are NaN.
  static void add_values(const WeightedBlock<V>& block, const WeightScale*) {
    const std::int64_t dim = block.params.value_dim;
    const std::int64_t count = block.keys.count;
    const BlockOperand<V, KvPart::kValues> values(block.params, block.sequence, block.keys,
                                                  block.first_kv_head, block.staging);
    with_stored<V>(values.dtype(), [&](auto stored) {
      constexpr DType kStored = decltype(stored)::kDType;
      const StoredRows v = values.rows(block.head);
      if (block.masks && !all_finite<V, kStored>(v, count, dim)) {
        // The guarded product reads whole vectors, so rows are staged with padding.
        const std::int64_t width = block.out.stride;
        const KeySpan span{block.params, block.sequence, block.first_kv_head + block.head,
                           block.keys.begin, block.keys.begin + count};
        const RowBlock<const Scalar> staged =
            load_kv<KvPart::kValues>(span, Staging<Scalar>{block.staging, width});
        gemm_guarded<V, Layout::kRows, Guard::kMaskedA>(
            {.rows = block.rows, .width = width, .depth = count}, block.weights, staged,
            {.data = block.out.data, .stride = width, .accumulate = true});
        return;
      }
      add_weighted_rows(block.rows, ElementValues<V, kStored>{v, count, dim}, {block.weights.data},
                        block.ahead, block.out);
    });
  }

  /// Converts the weights of all rows, in place, to factors for add_value_group().
  static void prepare_weights(std::int64_t, std::int64_t, Scalar*) {}
  /// Adds the values of some keys, none of them masked.
  static void add_value_group(const WeightedBlock<V>& block, KeyGroup keys,
                              RowBlock<Scalar> carried) {
    const BlockOperand<V, KvPart::kValues> values(block.params, block.sequence, block.keys,
                                                  block.first_kv_head, block.staging);
    with_stored<V>(values.dtype(), [&](auto stored) {
      add_weighted_group(block.rows,
                         ElementValues<V, decltype(stored)::kDType>{
                             values.rows(block.head), block.keys.count, block.params.value_dim},
                         keys, {block.weights.data}, carried, block.out);
    });
  }
};

}  // namespace
}  // namespace ladon::cpu
