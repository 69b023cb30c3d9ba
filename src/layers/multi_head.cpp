#include "layers/multi_head.h"

#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon {

MultiHeadAttention::Plan::Plan(const MultiHeadAttentionOptions& options,
                               std::span<const Parameter> parameters)
    : query(linear_index_of(parameters, "q_proj")),
      key(linear_index_of(parameters, "k_proj")),
      value(linear_index_of(parameters, "v_proj")),
      out(linear_index_of(parameters, "out_proj")),
      query_norm(index_of(parameters, "q_norm.weight")),
      key_norm(index_of(parameters, "k_norm.weight")),
      sinks(index_of(parameters, "sinks")) {
  if (options.rope.has_value()) rope = {*options.rope, options.head_dim};
}

namespace multi_head {

void Steps::project_rows(const ConstTensorView& x, const LinearIndex& linear,
                         const TensorView& y) const {
  project(context_, x, weight(linear.weight), weight(linear.bias), y);
}

Tensor Steps::project_heads(const ConstTensorView& x, const LinearIndex& linear,
                            std::int64_t heads) const {
  Tensor y = Tensor::uninitialized(context_, heads_.options.dtype,
                                   {x.size(0), x.size(1), heads, heads_.options.head_dim});
  project_rows(InputRows(context_, x).view(), linear, merged(y));
  return y;
}

void Steps::norm_and_rope(const TensorView& heads, int norm, const RopePositions& positions) const {
  const MultiHeadAttentionOptions& options = heads_.options;
  if (options.qk_norm) rms_norm(context_, heads, weight(norm), norm_constants(options), heads);
  if (options.rope.has_value()) {
    rope_internal::rotate_in_place(context_, heads, heads_.plan.rope, positions);
  }
}

void Steps::project_new_tokens(const TokenRows::Inputs& inputs, const RowLists& lists,
                               const TensorView& q, const TensorView& k,
                               const TensorView& v) const {
  const MultiHeadAttention::Plan& plan = heads_.plan;
  project_rows(inputs.queries, plan.query, q);
  project_rows(inputs.tokens, plan.key, k);
  project_rows(inputs.tokens, plan.value, v);
  norm_and_rope(heads_of_rows(q, heads_.options.num_heads), plan.query_norm,
                {.explicit_positions = lists.query_positions});
  norm_and_rope(heads_of_rows(k, heads_.options.num_kv_heads), plan.key_norm,
                {.explicit_positions = lists.positions});
}

AttentionOptions Steps::attention_options(std::optional<bool> causal) const {
  const MultiHeadAttentionOptions& options = heads_.options;
  AttentionOptions attention;
  attention.scale = options.scale;
  attention.causal = causal.value_or(options.causal);
  attention.window_left = options.window_left;
  attention.window_right = options.window_right;
  attention.softcap = options.softcap;
  attention.alibi_slopes = heads_.alibi_slopes;
  attention.sinks = weight(heads_.plan.sinks);
  attention.dropout.first_head = heads_.first_head;
  return attention;
}

}  // namespace multi_head
}  // namespace ladon
