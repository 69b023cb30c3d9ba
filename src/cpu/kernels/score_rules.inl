// From q.k to a masked score: softcap, ALiBi, bias and masks, in the contract's order. A new rule
// is a line in apply_rules() and, where it needs numbers of its own, a field beside the others.
//
// Scores come in tiles whose lanes are queries (forward_tile, backward) or keys (forward_decode).
// apply_rules() does not care: it gets a vector of keys and vectors of what the queries bring.
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
template <class Scalar>
struct Rows {
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

template <class Scalar>
inline void set_rows(Rows<Scalar>& rows, const AttentionParams& params, const Sequence& sequence,
                     std::int64_t first_head, std::int64_t heads_per_token, std::int64_t row_begin,
                     std::int64_t row_count, std::int64_t key_begin, std::int64_t key_end) {
  rows.count = row_count;
  rows.some_first = kNoWindow;
  rows.some_end = 0;
  rows.all_first = 0;
  rows.all_end = kNoWindow;
  for (std::int64_t r = 0; r < row_count; ++r) {
    const std::int64_t token = (row_begin + r) / heads_per_token;
    const std::int64_t position = token + sequence.position_offset;
    std::int64_t first = larger(key_begin, position - params.rules.window_left);
    std::int64_t end = smaller(key_end, position + params.rules.window_right + 1);
    if (first >= end) {  // sees nothing: an interval that no key is in
      first = kNoWindow;
      end = 0;
    } else {
      rows.some_first = smaller(rows.some_first, first);
      rows.some_end = larger(rows.some_end, end);
    }
    rows.token[r] = token;
    rows.head[r] = first_head + (row_begin + r) % heads_per_token;
    rows.first_key[r] = first;
    rows.end_key[r] = end;
    rows.all_first = larger(rows.all_first, first);
    rows.all_end = smaller(rows.all_end, end);
  }
}

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

/// Bias and mask of a block as one array: element (row, key) at row * row_step + key * key_step.
template <class Scalar>
inline void fill_extra(const AttentionParams& params, const Sequence& sequence,
                       const Rows<Scalar>& rows, std::int64_t key_begin, std::int64_t key_count,
                       Scalar* to, std::int64_t row_step, std::int64_t key_step) {
  const BroadcastOperand& bias = params.rules.bias;
  const BroadcastOperand& mask = params.rules.mask;
  Scalar line[kKeyBlock];
  for (std::int64_t r = 0; r < rows.count; ++r) {
    if (bias.data == nullptr) {
      for (std::int64_t i = 0; i < key_count; ++i) line[i] = 0;
    } else {
      const std::int64_t start = sequence.index * bias.sequence_stride +
                                 rows.head[r] * bias.head_stride +
                                 rows.token[r] * bias.query_stride + key_begin * bias.key_stride;
      if (bias.key_stride == 1) {
        load_row(at(bias.data, bias.dtype, start), bias.dtype, key_count, line);
      } else {
        for (std::int64_t i = 0; i < key_count; ++i) {
          load_row(at(bias.data, bias.dtype, start + i * bias.key_stride), bias.dtype, 1, line + i);
        }
      }
    }
    if (mask.data != nullptr) {
      const std::uint8_t* allowed = static_cast<const std::uint8_t*>(mask.data) +
                                    sequence.index * mask.sequence_stride +
                                    rows.head[r] * mask.head_stride +
                                    rows.token[r] * mask.query_stride + key_begin * mask.key_stride;
      for (std::int64_t i = 0; i < key_count; ++i) {
        if (allowed[i * mask.key_stride] == 0) line[i] = -MathConstants<Scalar>::kInfinity;
      }
    }
    for (std::int64_t i = 0; i < key_count; ++i) to[r * row_step + i * key_step] = line[i];
  }
}

/// Dropout factors of a block, laid out like fill_extra()'s.
template <class Scalar>
inline void fill_keep(const ScoreRules& rules, const Sequence& sequence, const Rows<Scalar>& rows,
                      std::int64_t key_begin, std::int64_t key_count, Scalar* to,
                      std::int64_t row_step, std::int64_t key_step) {
  const Scalar kept = static_cast<Scalar>(rules.dropout_scale);
  for (std::int64_t r = 0; r < rows.count; ++r) {
    for (std::int64_t i = 0; i < key_count;) {
      const std::int64_t key = key_begin + i;
      const PhiloxBlock block = dropout_block(rules.dropout_seed, sequence.dropout_index,
                                              rows.head[r], rows.token[r], key);
      for (std::int64_t word = key % 4; word < 4 && i < key_count; ++word, ++i) {
        to[r * row_step + i * key_step] =
            block.words[word] < rules.dropout_threshold ? Scalar{0} : kept;
      }
    }
  }
}

/// Sets up `block` for keys [key_begin, key_begin + key_count). `extra` and `keep` are room for
/// fill_extra() and fill_keep(), used where the rules need them.
template <class Scalar>
inline void set_block(BlockRules<Scalar>& block, const AttentionParams& params,
                      const Sequence& sequence, const Rows<Scalar>& rows, std::int64_t key_begin,
                      std::int64_t key_count, Scalar* extra, Scalar* keep, std::int64_t row_step,
                      std::int64_t key_step) {
  const ScoreRules& rules = params.rules;
  using C = MathConstants<Scalar>;
  const bool capped = rules.softcap != 0 && rules.softcap < C::kLargestCap;
  const double cap = rules.softcap < C::kSmallestCap ? C::kSmallestCap : rules.softcap;
  block.softcap = capped ? static_cast<Scalar>(cap) : Scalar{0};
  block.inverse_softcap = capped ? static_cast<Scalar>(1 / cap) : Scalar{0};
  block.alibi = rules.alibi_slopes.data != nullptr;
  block.positional = rows.all_first > key_begin || rows.all_end < key_begin + key_count;
  for (std::int64_t r = 0; r < rows.count; ++r) {
    // Clamped to the block, so that any length is exact in a float.
    const std::int64_t first = smaller(larger(rows.first_key[r] - key_begin, 0), key_count);
    const std::int64_t last = smaller(larger(rows.end_key[r] - key_begin, 0), key_count) - 1;
    block.first[r] = static_cast<Scalar>(first);
    block.last[r] = static_cast<Scalar>(last);
    if (block.alibi) {
      block.position[r] = static_cast<Scalar>(rows.token[r] + sequence.position_offset - key_begin);
      block.slope[r] = narrow<Scalar>(head_element(rules.alibi_slopes, rows.head[r]));
    }
  }
  block.extra = nullptr;
  block.extra_masks = false;
  if (rules.bias.data != nullptr || rules.mask.data != nullptr) {
    fill_extra(params, sequence, rows, key_begin, key_count, extra, row_step, key_step);
    block.extra = extra;
    block.extra_masks = true;
  }
  block.keep = nullptr;
  if (rules.dropout) {
    fill_keep(rules, sequence, rows, key_begin, key_count, keep, row_step, key_step);
    block.keep = keep;
  }
}

/// A vector of scores through all rules; -inf where masked. With kGradient, *cap_gradient becomes
/// the derivative of the softcap. `index` is where the scores lie in their tile.
template <class V, bool kGradient>
inline V apply_rules(const BlockRules<typename V::Scalar>& block, V score, V key, V first, V last,
                     V position, V slope, std::int64_t index, V* cap_gradient) {
  using C = MathConstants<typename V::Scalar>;
  if (block.softcap != 0) {
    const Tanh<V> bent = tanh(score * broadcast<V>(block.inverse_softcap));
    if constexpr (kGradient) *cap_gradient = bent.derivative;
    score = bent.value * broadcast<V>(block.softcap);
  }
  if (block.alibi) score = score - slope * abs(position - key);
  const V hidden_score = broadcast<V>(-C::kInfinity);
  auto hidden = either(less(key, first), less(last, key));
  if (block.extra != nullptr) {
    const V added = load<V>(block.extra + index);
    hidden = either(hidden, identical(added, hidden_score));
    score = score + added;
  }
  return select(hidden, hidden_score, score);
}

}  // namespace
}  // namespace ladon::cpu
