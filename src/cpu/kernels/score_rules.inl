// From q.k to a masked score: softcap, ALiBi, bias and masks, in the order of the contract. A new
// rule is a line in apply_rules() and, where it needs parameters, a field of BlockRules.
//
// Scores come in tiles whose lanes are queries (forward_tile, backward) or keys (forward_decode).
// apply_rules() serves both: it takes a vector of keys and the QueryLanes of the queries.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "core/philox.h"
#include "cpu/kernels/convert.inl"

namespace ladon::cpu {
namespace {

inline constexpr std::int64_t kMaxRows = 64;   // most rows of a tile, on any instruction set
inline constexpr std::int64_t kKeyBlock = 64;  // keys that are scored at a time

/// The rows of one tile: which token and head each one is, and which keys it sees.
struct QueryRows {
  std::int64_t count = 0;
  std::int64_t token[kMaxRows];
  std::int64_t head[kMaxRows];
  std::int64_t first_key[kMaxRows];
  std::int64_t end_key[kMaxRows];
  // Keys that some row sees; keys that every row sees.
  std::int64_t some_first = kNoWindow;
  std::int64_t some_end = 0;
  std::int64_t all_first = 0;
  std::int64_t all_end = kNoWindow;
};

/// Rows [begin, begin + count) of a score matrix whose row r is token r / heads_per_token of head
/// first_head + r % heads_per_token.
struct RowSpan {
  std::int64_t first_head = 0;
  std::int64_t heads_per_token = 1;
  std::int64_t begin = 0;
  std::int64_t count = 0;
};

/// Keys [begin, end) of a sequence.
struct KeyRange {
  std::int64_t begin = 0;
  std::int64_t end = 0;

  std::int64_t count() const { return end - begin; }
};

inline void set_rows(QueryRows& rows, const AttentionParams& params, const Sequence& sequence,
                     const RowSpan& span, KeyRange keys) {
  rows.count = span.count;
  rows.some_first = kNoWindow;
  rows.some_end = 0;
  rows.all_first = 0;
  rows.all_end = kNoWindow;
  for (std::int64_t r = 0; r < span.count; ++r) {
    const std::int64_t token = (span.begin + r) / span.heads_per_token;
    const std::int64_t position = token + sequence.position_offset;
    std::int64_t first = larger(keys.begin, position - params.rules.window_left);
    std::int64_t end = smaller(keys.end, position + params.rules.window_right + 1);
    if (first >= end) {  // sees no key: an empty interval
      first = kNoWindow;
      end = 0;
    } else {
      rows.some_first = smaller(rows.some_first, first);
      rows.some_end = larger(rows.some_end, end);
    }
    rows.token[r] = token;
    rows.head[r] = span.first_head + (span.begin + r) % span.heads_per_token;
    rows.first_key[r] = first;
    rows.end_key[r] = end;
    rows.all_first = larger(rows.all_first, first);
    rows.all_end = smaller(rows.all_end, end);
  }
}

/// The rows of a tile in a [token, head, dim] operand: q or dout.
struct QueryOperand {
  const Operand& operand;
  std::int64_t offset;  // the sequence's first element
  const QueryRows& rows;
  std::int64_t dim;

  /// The first element of row r.
  std::int64_t start(std::int64_t r) const {
    return offset + rows.token[r] * operand.token_stride + rows.head[r] * operand.head_stride;
  }
};

/// Scores of a tile's rows with some keys, [keys][width]: lanes are rows.
template <class Scalar>
struct ScoreTile {
  Scalar* data = nullptr;
  std::int64_t keys = 0;
  std::int64_t width = 0;
};

/// Where the score of a row and a key is stored: at row * row_step + key * key_step.
struct ScoreLayout {
  std::int64_t row_step = 0;
  std::int64_t key_step = 0;
};

/// Scratch for the arrays of fill_extra() and fill_keep(), in the layout of the scores.
template <class Scalar>
struct RuleScratch {
  Scalar* extra = nullptr;
  Scalar* keep = nullptr;
  ScoreLayout layout;
};

/// What the rules need for one block of keys, relative to its first key.
template <class Scalar>
struct BlockRules {
  Scalar softcap = 0;
  Scalar inverse_softcap = 0;
  bool alibi = false;
  bool positional = false;        // some row does not see all keys of the block
  bool extra_masks = false;       // `extra` may hold -inf
  const Scalar* extra = nullptr;  // bias, and -inf where masked
  const Scalar* keep = nullptr;   // dropout: 0 or 1 / (1 - probability)
  alignas(64) Scalar first[kMaxRows] = {};
  alignas(64) Scalar last[kMaxRows] = {};
  alignas(64) Scalar position[kMaxRows] = {};
  alignas(64) Scalar slope[kMaxRows] = {};

  bool masks() const { return positional || extra_masks; }
  bool plain() const { return softcap == 0 && !alibi && !positional && extra == nullptr; }
};

/// Combines bias and mask of a block into one array: the bias, and -inf where masked.
template <class Scalar>
inline void fill_extra(const AttentionParams& params, const Sequence& sequence,
                       const QueryRows& rows, KeyRange keys, ScoreLayout layout, Scalar* to) {
  const BroadcastOperand& bias = params.rules.bias;
  const BroadcastOperand& mask = params.rules.mask;
  const std::int64_t count = keys.count();
  Scalar line[kKeyBlock];
  for (std::int64_t r = 0; r < rows.count; ++r) {
    if (bias.data == nullptr) {
      for (std::int64_t i = 0; i < count; ++i) line[i] = 0;
    } else {
      const std::int64_t start = sequence.index * bias.sequence_stride +
                                 rows.head[r] * bias.head_stride +
                                 rows.token[r] * bias.query_stride + keys.begin * bias.key_stride;
      if (bias.key_stride == 1) {
        load_row(at(bias.data, bias.dtype, start), bias.dtype, count, line);
      } else {
        for (std::int64_t i = 0; i < count; ++i) {
          load_row(at(bias.data, bias.dtype, start + i * bias.key_stride), bias.dtype, 1, line + i);
        }
      }
    }
    if (mask.data != nullptr) {
      const std::uint8_t* allowed =
          static_cast<const std::uint8_t*>(mask.data) + sequence.index * mask.sequence_stride +
          rows.head[r] * mask.head_stride + rows.token[r] * mask.query_stride +
          keys.begin * mask.key_stride;
      for (std::int64_t i = 0; i < count; ++i) {
        if (allowed[i * mask.key_stride] == 0) line[i] = -MathConstants<Scalar>::kInfinity;
      }
    }
    for (std::int64_t i = 0; i < count; ++i) {
      to[r * layout.row_step + i * layout.key_step] = line[i];
    }
  }
}

/// Writes the dropout factors of a block.
template <class Scalar>
inline void fill_keep(const ScoreRules& rules, const Sequence& sequence, const QueryRows& rows,
                      KeyRange keys, ScoreLayout layout, Scalar* to) {
  const Scalar kept = static_cast<Scalar>(rules.dropout_scale);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    for (std::int64_t i = 0; i < keys.count();) {
      const std::int64_t key = rules.dropout_key + keys.begin + i;
      const PhiloxBlock block = dropout_block(rules.dropout_seed, sequence.dropout_index,
                                              rules.dropout_head + rows.head[r],
                                              rules.dropout_query + rows.token[r], key);
      for (std::int64_t word = key % 4; word < 4 && i < keys.count(); ++word, ++i) {
        to[r * layout.row_step + i * layout.key_step] =
            block.words[word] < rules.dropout_threshold ? Scalar{0} : kept;
      }
    }
  }
}

/// Sets up `block` for some keys. The scratch is used only where there is a bias, mask or dropout.
template <class Scalar>
inline void set_block(BlockRules<Scalar>& block, const AttentionParams& params,
                      const Sequence& sequence, const QueryRows& rows, KeyRange keys,
                      const RuleScratch<Scalar>& scratch) {
  const ScoreRules& rules = params.rules;
  using C = MathConstants<Scalar>;
  const bool capped = rules.softcap != 0 && rules.softcap < C::kLargestCap;
  const double cap = rules.softcap < C::kSmallestCap ? C::kSmallestCap : rules.softcap;
  block.softcap = capped ? static_cast<Scalar>(cap) : Scalar{0};
  block.inverse_softcap = capped ? static_cast<Scalar>(1 / cap) : Scalar{0};
  block.alibi = rules.alibi_slopes.data != nullptr;
  block.positional = rows.all_first > keys.begin || rows.all_end < keys.end;
  for (std::int64_t r = 0; r < rows.count; ++r) {
    // Clamped to the block: a float holds any position within it exactly.
    const std::int64_t first = smaller(larger(rows.first_key[r] - keys.begin, 0), keys.count());
    const std::int64_t last = smaller(larger(rows.end_key[r] - keys.begin, 0), keys.count()) - 1;
    block.first[r] = static_cast<Scalar>(first);
    block.last[r] = static_cast<Scalar>(last);
    if (block.alibi) {
      block.position[r] =
          static_cast<Scalar>(rows.token[r] + sequence.position_offset - keys.begin);
      block.slope[r] = narrow<Scalar>(head_element(rules.alibi_slopes, rows.head[r]));
    }
  }
  block.extra = nullptr;
  block.extra_masks = false;
  if (rules.bias.data != nullptr || rules.mask.data != nullptr) {
    fill_extra(params, sequence, rows, keys, scratch.layout, scratch.extra);
    block.extra = scratch.extra;
    block.extra_masks = true;
  }
  block.keep = nullptr;
  if (rules.dropout) {
    fill_keep(rules, sequence, rows, keys, scratch.layout, scratch.keep);
    block.keep = scratch.keep;
  }
}

/// The rules' inputs that depend on the query, per lane: the keys that it sees, its position and
/// its ALiBi slope.
template <class V>
struct QueryLanes {
  V first;
  V last;
  V position;
  V slope;
};

/// For lanes that are rows, from `row` on.
template <class V>
inline QueryLanes<V> load_lanes(const BlockRules<typename V::Scalar>& block, std::int64_t row) {
  return {load<V>(block.first + row), load<V>(block.last + row), load<V>(block.position + row),
          load<V>(block.slope + row)};
}
/// For lanes that are keys of one row.
template <class V>
inline QueryLanes<V> broadcast_lanes(const BlockRules<typename V::Scalar>& block,
                                     std::int64_t row) {
  return {broadcast<V>(block.first[row]), broadcast<V>(block.last[row]),
          broadcast<V>(block.position[row]), broadcast<V>(block.slope[row])};
}

/// Applies all rules to a vector of scores; -inf where masked. With kGradient, *cap_gradient
/// becomes the derivative of the softcap. `index` is the position of the scores in their tile.
template <class V, bool kGradient>
inline V apply_rules(const BlockRules<typename V::Scalar>& block, const QueryLanes<V>& query, V key,
                     std::int64_t index, V score, V* cap_gradient) {
  using C = MathConstants<typename V::Scalar>;
  if (block.softcap != 0) {
    const Tanh<V> bent = tanh(score * broadcast<V>(block.inverse_softcap));
    if constexpr (kGradient) *cap_gradient = bent.derivative;
    score = bent.value * broadcast<V>(block.softcap);
  }
  if (block.alibi) score = score - query.slope * abs(query.position - key);
  const V hidden_score = broadcast<V>(-C::kInfinity);
  auto hidden = either(less(key, query.first), less(query.last, key));
  if (block.extra != nullptr) {
    const V added = load<V>(block.extra + index);
    hidden = either(hidden, identical(added, hidden_score));
    score = score + added;
  }
  return select(hidden, hidden_score, score);
}

}  // namespace
}  // namespace ladon::cpu
