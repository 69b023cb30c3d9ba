// What forward and backward of MultiHeadAttention share.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "core/checks.h"
#include "core/kv_params.h"
#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "layers/cached_tokens.h"
#include "layers/layer_weights.h"
#include "layers/norm.h"
#include "layers/projection.h"
#include "layers/rope_internal.h"
#include "layers/rows.h"
#include "layers/saved_forward.h"

namespace ladon {

/// What a layer works out once, from its options and the names of its parameters.
class MultiHeadAttention::Plan {
 public:
  Plan(const MultiHeadAttentionOptions& options, std::span<const Parameter> parameters);

  LinearIndex query, key, value, out;
  int query_norm = kNoParameter;
  int key_norm = kNoParameter;
  int sinks = kNoParameter;
  rope_internal::RopePlan rope;
};

namespace multi_head {

/// Checks a layer's options, and fills in the defaults. Throws Error.
MultiHeadAttentionOptions complete_options(MultiHeadAttentionOptions options);

inline NormConstants norm_constants(const MultiHeadAttentionOptions& options) {
  return {options.qk_norm_epsilon, options.qk_norm_offset, options.qk_norm_centered};
}

/// Of the weight of a q/k norm over this many heads.
inline Dims norm_shape(const MultiHeadAttentionOptions& options, std::int64_t heads) {
  switch (options.qk_norm_span) {
    case QkNormSpan::kHead: break;
    case QkNormSpan::kAllHeads: return {heads * options.head_dim};
    case QkNormSpan::kEachHead: return {heads, options.head_dim};
  }
  return {options.head_dim};
}

/// What a call of forward_training() leaves for backward. The inputs are copies: the caller's may
/// be gone by then.
class Saved : public SavedForward::Impl {
 public:
  using Impl::Impl;

  LayerInputs inputs() const override { return {query, key, value}; }

  bool self = false;
  bool own_value = false;
  bool one_position = false;  // attention was the identity: q, k and lse are empty
  Tensor query, key,
      value;  // key and value are empty where they are another input
  Tensor q, k,
      v;            // after projection, norm and rope: [batch, seq, heads, head_dim]
  Tensor attended;  // [batch, query_len, num_heads, head_dim]
  Tensor lse;

  ConstTensorView key_input() const { return self ? query : key; }
  ConstTensorView value_input() const { return own_value ? ConstTensorView(value) : key_input(); }
};

/// The heads that a layer has here, which are all of them or, where ranks share a layer, a part.
struct LayerHeads {
  LayerHeads(const MultiHeadAttention& all)  // NOLINT: a whole layer is all of its heads
      : layer(all), options(all.options()), plan(all.plan()), alibi_slopes(all.alibi_slopes()) {}
  LayerHeads(const AttentionLayer& of, const MultiHeadAttentionOptions& own,
             const MultiHeadAttention::Plan& indices, const ConstTensorView& slopes,
             std::int64_t first, std::int64_t group)
      : layer(of),
        options(own),
        plan(indices),
        alibi_slopes(slopes),
        first_head(first),
        whole_group(group) {}

  const AttentionLayer& layer;
  const MultiHeadAttentionOptions& options;  // with the numbers of heads that are here
  const MultiHeadAttention::Plan& plan;
  ConstTensorView alibi_slopes;
  std::int64_t first_head = 0;
  std::int64_t whole_group = 0;  // query heads of a KV head in the whole layer; 0: as here
};

/// The inputs of a call, all three [batch, seq, width].
struct CheckedInputs {
  ConstTensorView query, key, value;
  bool self = false;       // key and value are the query
  bool own_value = false;  // value was given
  bool batched = true;
};

/// All that can be refused, before anything is computed. `options` are the whole layer's.
CheckedInputs check_call(const Operation& operation, const AttentionLayer& layer,
                         const MultiHeadAttentionOptions& options, const LayerInputs& inputs,
                         const LayerCall& call);

/// Everything up to the output projection.
struct AttendedHeads {
  bool one_position = false;  // attention was the identity: q, k and lse are empty
  AttentionOptions options;
  Tensor q, k, v, attended, lse;  // lse where it is to be kept
};
AttendedHeads attend_heads(const Context& context, const LayerHeads& heads,
                           const CheckedInputs& inputs, const LayerCall& call, bool keeps_lse);

/// Moves what backward needs into `saved`, with copies of the inputs, so that it stands alone.
void keep_forward(const Context& context, const CheckedInputs& inputs, const LayerCall& call,
                  AttendedHeads& heads, Saved& saved);

/// The rotations of a cached call's queries and keys; none without rope.
struct NewTokenRotations {
  std::array<RopeParams, 2> params{};
  std::size_t count = 0;
};

/// The steps of a forward pass; backward repeats some of them.
class Steps {
 public:
  Steps(const Context& context, const LayerHeads& heads) : context_(context), heads_(heads) {}

  ConstTensorView weight(int index) const { return weight_of(heads_.layer, index); }
  /// x W^T + b of rows.
  void project_rows(const ConstTensorView& x, const LinearIndex& linear, const TensorView& y) const;
  /// x W^T + b as [batch, seq, heads, head_dim].
  Tensor project_heads(const ConstTensorView& x, const LinearIndex& linear,
                       std::int64_t heads) const;
  /// The same of q, k and v of a call.
  void project_heads(const CheckedInputs& inputs, Tensor& q, Tensor& k, Tensor& v) const;
  /// Of queries and keys, in place.
  void norm(const TensorView& q, const TensorView& k) const;
  void norm_and_rope(const TensorView& q, const RopePositions& query_positions, const TensorView& k,
                     const RopePositions& key_positions) const;
  /// Queries, keys and values of a cached call: rows of its inputs to rows of all heads. What is
  /// returned is left for KvAppend to do (append_steps()), and reads the lists.
  NewTokenRotations project_new_tokens(const TokenRows::Inputs& inputs, const RowLists& lists,
                                       const TensorView& q, const TensorView& k,
                                       const TensorView& v) const;
  /// What else the append of new tokens does: they are rotated, and W_o, which is read when
  /// attention is over, may be prefetched meanwhile.
  AppendSteps append_steps(const NewTokenRotations& rotations) const;
  /// What the layer's own options say; the call's are the caller's to add.
  AttentionOptions attention_options(std::optional<bool> causal) const;

 private:
  /// Uninitialised heads of x's tokens.
  Tensor heads_for(const ConstTensorView& x, std::int64_t heads) const;
  Projection projection_of(const ConstTensorView& x, const LinearIndex& linear,
                           const TensorView& y) const;

  const Context& context_;
  const LayerHeads heads_;
};

/// [rows, heads * head_dim] as [1, rows, heads, head_dim].
inline TensorView heads_of_rows(const TensorView& rows, std::int64_t heads) {
  return rows.reshape({1, rows.size(0), heads, rows.size(1) / heads});
}

/// Refuses a cache that cannot serve this layer.
void check_cached_layer(const Operation& operation, const AttentionLayer& layer,
                        const MultiHeadAttentionOptions& options, const KvCache& cache);

}  // namespace multi_head
}  // namespace ladon
