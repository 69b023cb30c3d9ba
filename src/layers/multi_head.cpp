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

Tensor Steps::heads_for(const ConstTensorView& x, std::int64_t heads) const {
  return Tensor::uninitialized(context_, heads_.options.dtype,
                               {x.size(0), x.size(1), heads, heads_.options.head_dim});
}

Tensor Steps::project_heads(const ConstTensorView& x, const LinearIndex& linear,
                            std::int64_t heads) const {
  Tensor y = heads_for(x, heads);
  project_rows(InputRows(context_, x).view(), linear, merged(y));
  return y;
}

Projection Steps::projection_of(const ConstTensorView& x, const LinearIndex& linear,
                                const TensorView& y) const {
  return {x, weight(linear.weight), weight(linear.bias), y};
}

void Steps::project_heads(const CheckedInputs& inputs, Tensor& q, Tensor& k, Tensor& v) const {
  const MultiHeadAttention::Plan& plan = heads_.plan;
  q = heads_for(inputs.query, heads_.options.num_heads);
  k = heads_for(inputs.key, heads_.options.num_kv_heads);
  v = heads_for(inputs.value, heads_.options.num_kv_heads);
  const InputRows query(context_, inputs.query);
  const InputRows key(context_, inputs.key);
  const InputRows value(context_, inputs.value);
  project_all(context_, std::array{projection_of(query.view(), plan.query, merged(q)),
                                   projection_of(key.view(), plan.key, merged(k)),
                                   projection_of(value.view(), plan.value, merged(v))});
}

void Steps::norm(const TensorView& q, const TensorView& k) const {
  const MultiHeadAttentionOptions& options = heads_.options;
  if (!options.qk_norm) return;
  rms_norm(context_, q, weight(heads_.plan.query_norm), norm_constants(options), q);
  rms_norm(context_, k, weight(heads_.plan.key_norm), norm_constants(options), k);
}

void Steps::norm_and_rope(const TensorView& q, const RopePositions& query_positions,
                          const TensorView& k, const RopePositions& key_positions) const {
  norm(q, k);
  if (heads_.options.rope.has_value()) {
    rope_internal::rotate_in_place(context_, {q, query_positions}, {k, key_positions},
                                   heads_.plan.rope);
  }
}

NewTokenRotations Steps::project_new_tokens(const TokenRows::Inputs& inputs, const RowLists& lists,
                                            const TensorView& q, const TensorView& k,
                                            const TensorView& v) const {
  const MultiHeadAttention::Plan& plan = heads_.plan;
  project_all(context_, std::array{projection_of(inputs.queries, plan.query, q),
                                   projection_of(inputs.tokens, plan.key, k),
                                   projection_of(inputs.tokens, plan.value, v)});
  const TensorView query_heads = heads_of_rows(q, heads_.options.num_heads);
  const TensorView key_heads = heads_of_rows(k, heads_.options.num_kv_heads);
  norm(query_heads, key_heads);
  if (!heads_.options.rope.has_value()) return {};
  const RopePositions query_positions{.explicit_positions = lists.query_positions};
  const RopePositions key_positions{.explicit_positions = lists.positions};
  return {rope_internal::rotations_of({query_heads, query_positions}, {key_heads, key_positions},
                                      plan.rope),
          2};
}

AppendSteps Steps::append_steps(const NewTokenRotations& rotations) const {
  const ConstTensorView out = weight(heads_.plan.out.weight);
  return {
      .rotations = {rotations.params.data(), rotations.count},
      .next = {out.data(), static_cast<std::size_t>(out.num_elements()) * size_of(out.dtype())}};
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
