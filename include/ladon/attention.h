// attention() and its backward: multi-head, grouped-query and multi-query in one function.
//
//   q    [batch, query_len, num_heads,    head_dim]
//   k    [batch, kv_len,    num_kv_heads, head_dim]
//   v    [batch, kv_len,    num_kv_heads, value_dim]
//   out  [batch, query_len, num_heads,    value_dim]
//   lse  [batch, num_heads, query_len]     f32 or f64; f64 where q is f64
//
// num_heads is a multiple of num_kv_heads; query head h reads KV head h / (num_heads /
// num_kv_heads). Views may be strided in every dimension but the last, whose stride must be 1.
// q, out and dout share one dtype (f64, f32, f16 or bf16); k and v share one that is q's or a
// narrower one. For parts that are to be summed or merged, out, dq, dk and dv may also be f32 where
// their inputs are f16 or bf16, and lse may be f64. An output may not overlap an input or another
// output.
//
// One score goes through: s = scale * q.k -> softcap * tanh(s / softcap) -> + ALiBi -> + bias ->
// masks -> softmax (a sink adds exp(sink) to the denominator) -> dropout -> times v.
//
// What always holds:
//  1. A row that may see nothing gives out = 0, lse = -inf and zero gradients.
//  2. What is masked is not read: garbage there reaches no output and no gradient.
//  3. NaN or infinity in a visible input reaches the rows that see it, and no other row.
//  4. batch, query_len and kv_len may be 0.
//  5. |error| <= c * epsilon * sum(p * |v|) for every element; docs/numerics.md states c.
//  6. Same inputs, same bits: for any number of threads and any other sequences in the batch.
//  7. Extra memory grows with query_len + kv_len, never with their product.
//  8. Any length and any head_dim from 1 on work.
//  9. Every function here may be called from many threads at once.
// 10. On GPUs a token's output has the same bits in a whole-sequence or training forward and in
//     chunks of any size, one token included, over a cache of any kind. On CPUs it has where the
//     Context is chunk_invariant, except over window caches.
//
// All functions throw Error and then have written nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Where query 0 stands among the keys: query i has position i + offset.
enum class Alignment : std::uint8_t {
  kBottomRight,  // offset = kv_len - query_len: the last query stands at the last key (a KV cache)
  kTopLeft,      // offset = 0
};

struct DropoutOptions {
  double probability = 0;  // in [0, 1); 0 is off
  std::uint64_t seed = 0;
  /// Number of the first sequence of this call. A weight's fate depends on (seed, sequence, head,
  /// query, key) alone, so with its number a sequence can be repeated outside its batch.
  std::int64_t first_sequence = 0;
  /// The same for a call that has only some of the heads, queries or keys: the number of its first.
  std::int64_t first_head = 0;
  std::int64_t first_query = 0;
  std::int64_t first_key = 0;
};

struct AttentionOptions {
  /// Factor of q.k. Empty: 1 / sqrt(head_dim).
  std::optional<double> scale{};

  /// A query sees no key past its own position.
  bool causal = false;
  /// Gives the positions that causal, window and ALiBi go by. Each sequence uses its own lengths.
  Alignment alignment = Alignment::kBottomRight;
  /// The same for any part of the keys, in place of an alignment: query i of every sequence has
  /// position i + position_offset among the keys of this call. It may be before or after all of
  /// them.
  std::optional<std::int64_t> position_offset{};
  /// A query at position p sees keys in [p - left, p + right]. Empty: no limit on that side.
  std::optional<std::int64_t> window_left{};
  std::optional<std::int64_t> window_right{};

  /// bool, true where a query may look. [batch, num_heads, query_len, kv_len], any of them 1.
  ConstTensorView mask{};
  /// Any float dtype, added to the score; same shape rule as mask. -inf masks, as false does.
  ConstTensorView bias{};

  /// Padded batch: only the first kv_lengths[b] keys of sequence b exist. Size batch, or empty.
  std::span<const std::int64_t> kv_lengths{};
  /// Packed batch: q is [1, total_queries, ...], k and v are [1, total_keys, ...], and sequence s
  /// owns queries [query_offsets[s], query_offsets[s + 1]) and keys likewise. Both or none. The
  /// batch dimension of mask and bias then counts sequences; their query and key dimensions are
  /// as long as the longest sequence, and index from each sequence's own start.
  std::span<const std::int64_t> query_offsets{};
  std::span<const std::int64_t> kv_offsets{};

  /// Scores become softcap * tanh(score / softcap). 0 is off; not negative.
  double softcap = 0;
  /// [num_heads], any float dtype: adds -slope * |key - position|.
  ConstTensorView alibi_slopes{};
  /// [num_heads], any float dtype: exp(sink) joins the softmax's denominator.
  ConstTensorView sinks{};

  DropoutOptions dropout{};
};

/// Writes out, and lse where it is given. lse is the natural log of the softmax's denominator, sink
/// included, dropout ignored.
LADON_API void attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                         const ConstTensorView& v, const AttentionOptions& options,
                         const TensorView& out, const TensorView& lse = {});

/// The same, into a new tensor.
LADON_API Tensor attention(const Context& context, const ConstTensorView& q,
                           const ConstTensorView& k, const ConstTensorView& v,
                           const AttentionOptions& options = {});

/// What the forward call gave, and the gradient that came back.
struct AttentionSaved {
  ConstTensorView out{};
  ConstTensorView lse{};
  ConstTensorView dout{};  // shape and dtype of out
  ConstTensorView dlse{};  // shape of lse, f32 or f64 as lse may be; absent where lse was not used
};

/// Gradients to write; leave out those that are not wanted. Each has the shape of its input; dq, dk
/// and dv also its dtype, or f32 where that has 16 bits; dbias and dsinks any float dtype.
struct AttentionGradients {
  TensorView dq{};
  TensorView dk{};
  TensorView dv{};
  TensorView dbias{};
  TensorView dsinks{};
};

/// Overwrites the gradients. `options` must be those of the forward call.
LADON_API void attention_backward(const Context& context, const ConstTensorView& q,
                                  const ConstTensorView& k, const ConstTensorView& v,
                                  const AttentionOptions& options, const AttentionSaved& saved,
                                  const AttentionGradients& gradients);

/// How far along the path above attention_weights() stops.
enum class ScoreStage : std::uint8_t {
  kScaled,       // scale * q.k
  kSoftcapped,   // after softcap
  kMasked,       // after ALiBi and bias; -inf where masked
  kProbability,  // after softmax; 0 where masked
  kDropped,      // after dropout
};

/// The score matrix, for people who want to look: `weights` is [batch, num_heads, query_len,
/// kv_len], any float dtype. Keys past a sequence's length are masked (0 in the first two stages).
/// The one function here whose memory grows with query_len * kv_len. Packed batches are refused.
LADON_API void attention_weights(const Context& context, const ConstTensorView& q,
                                 const ConstTensorView& k, const AttentionOptions& options,
                                 const TensorView& weights,
                                 ScoreStage stage = ScoreStage::kProbability);

/// Merges attention over parts of the keys into attention over all of them: outs[i] and lses[i] are
/// what attention() gave for part i, in any split. Give `sinks` ([num_heads]) here and not to the
/// parts. lses may be f32 or f64 each. Parts are summed in the order given.
LADON_API void merge_attention(const Context& context, std::span<const ConstTensorView> outs,
                               std::span<const ConstTensorView> lses, const TensorView& out,
                               const TensorView& lse = {}, const ConstTensorView& sinks = {});

}  // namespace ladon
