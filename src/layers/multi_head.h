// What forward and backward of MultiHeadAttention share.
#pragma once

#include <cstdint>
#include <optional>

#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "layers/layer_weights.h"
#include "layers/norm.h"
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
  return {options.qk_norm_epsilon, options.qk_norm_offset};
}

/// What a call of forward_training() leaves for backward. The inputs are copies: the caller's may
/// be gone by then.
class Saved final : public SavedForward::Impl {
 public:
  using Impl::Impl;

  bool self = false;
  bool own_value = false;
  bool one_position = false;  // attention was the identity: q, k and lse are empty
  Tensor query, key, value;   // key and value are empty where they are another input
  Tensor q, k, v;             // after projection, norm and rope: [batch, seq, heads, head_dim]
  Tensor attended;            // [batch, query_len, num_heads, head_dim]
  Tensor lse;

  ConstTensorView key_input() const { return self ? query : key; }
  ConstTensorView value_input() const { return own_value ? ConstTensorView(value) : key_input(); }
};

/// The steps of a forward pass; backward repeats some of them.
class Steps {
 public:
  Steps(const Context& context, const MultiHeadAttention& layer)
      : context_(context), layer_(layer), plan_(layer.plan()) {}

  ConstTensorView weight(int index) const { return weight_of(layer_, index); }
  /// x W^T + b of rows.
  void project_rows(const ConstTensorView& x, const LinearIndex& linear, const TensorView& y) const;
  /// x W^T + b as [batch, seq, heads, head_dim].
  Tensor project_heads(const ConstTensorView& x, const LinearIndex& linear,
                       std::int64_t heads) const;
  /// In place; `norm` is the norm's weight.
  void norm_and_rope(const TensorView& heads, int norm, const RopePositions& positions) const;
  /// What the layer's own options say; the call's are the caller's to add.
  AttentionOptions attention_options(std::optional<bool> causal) const;

 private:
  const Context& context_;
  const MultiHeadAttention& layer_;
  const MultiHeadAttention::Plan& plan_;
};

}  // namespace multi_head
}  // namespace ladon
