#include "layers/multi_head.h"

#include <array>

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

void Steps::norm_and_rope(const TensorView& q, const RopePositions& query_positions,
                          const TensorView& k, const RopePositions& key_positions) const {
  const MultiHeadAttentionOptions& options = heads_.options;
  const MultiHeadAttention::Plan& plan = heads_.plan;
  if (options.qk_norm) {
    rms_norm(context_, q, weight(plan.query_norm), norm_constants(options), q);
    rms_norm(context_, k, weight(plan.key_norm), norm_constants(options), k);
  }
  if (options.rope.has_value()) {
    rope_internal::rotate_in_place(context_, {q, query_positions}, {k, key_positions}, plan.rope);
  }
}

void Steps::project_new_tokens(const TokenRows::Inputs& inputs, const RowLists& lists,
                               const TensorView& q, const TensorView& k,
                               const TensorView& v) const {
  const MultiHeadAttention::Plan& plan = heads_.plan;
  const auto projection = [&](const ConstTensorView& x, const LinearIndex& linear,
                              const TensorView& y) -> Projection {
    return {x, weight(linear.weight), weight(linear.bias), y};
  };
  project_all(context_, std::array{projection(inputs.queries, plan.query, q),
                                   projection(inputs.tokens, plan.key, k),
                                   projection(inputs.tokens, plan.value, v)});
  norm_and_rope(
      heads_of_rows(q, heads_.options.num_heads), {.explicit_positions = lists.query_positions},
      heads_of_rows(k, heads_.options.num_kv_heads), {.explicit_positions = lists.positions});
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
