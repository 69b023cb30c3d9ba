// What forward and backward of MultiHeadAttention share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "layers/rows.h"
#include "layers/saved_forward.h"

namespace ladon::multi_head {

/// Checks a layer's options, and fills in the defaults. Throws Error.
MultiHeadAttentionOptions complete_options(MultiHeadAttentionOptions options);

/// What a call of forward_training() leaves for backward. The inputs are copies: the caller's may
/// be gone by then.
class Saved final : public SavedForward::Impl {
 public:
  using Impl::Impl;

  bool self = false;
  bool own_value = false;
  bool one_position = false;  // attention was the identity: q, k and lse are empty
  Tensor query, key, value;   // key and value are empty where they are another input
  Tensor q, k, v;             // projected, normed and turned: [batch, seq, heads, head_dim]
  Tensor attended;            // [batch, query_len, num_heads, head_dim]
  Tensor lse;

  ConstTensorView key_input() const { return self ? query : key; }
  ConstTensorView value_input() const { return own_value ? ConstTensorView(value) : key_input(); }
};

/// The steps of a forward pass; backward repeats some of them.
class Pass {
 public:
  Pass(const Context& context, const MultiHeadAttention& layer)
      : context_(context), layer_(layer) {}

  /// A parameter's value; absent where the layer has none of that name.
  ConstTensorView weight(std::string_view name) const;
  /// x W^T + b as [batch, seq, heads, head_dim].
  Tensor project_heads(const ConstTensorView& x, const std::string& name, std::int64_t heads) const;
  /// Norm and rope, in place.
  void place(const TensorView& heads, std::string_view norm, const RopePositions& positions) const;
  /// What the layer's own options say; the call's are the caller's to add.
  AttentionOptions attention_options(std::optional<bool> causal) const;
  /// The layer's own, in place; absent where it has none.
  ConstTensorView alibi_slopes() const;

 private:
  const Context& context_;
  const MultiHeadAttention& layer_;
};

}  // namespace ladon::multi_head
