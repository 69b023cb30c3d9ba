#include "layers/multi_head.h"

#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon::multi_head {

ConstTensorView Pass::weight(std::string_view name) const {
  return layer_.has_parameter(name) ? ConstTensorView(layer_.parameter(name).value)
                                    : ConstTensorView();
}

Tensor Pass::project_heads(const ConstTensorView& x, const std::string& name,
                           std::int64_t heads) const {
  Tensor y =
      Tensor::uninitialized(layer_.dtype(), {x.size(0), x.size(1), heads, layer_.head_dim()});
  project(context_, InputRows(x).view(), weight(name + ".weight"), weight(name + ".bias"),
          merged(y));
  return y;
}

void Pass::place(const TensorView& heads, std::string_view norm,
                 const RopePositions& positions) const {
  const MultiHeadAttentionOptions& options = layer_.options();
  if (options.qk_norm) rms_norm(context_, heads, weight(norm), options.qk_norm_epsilon, heads);
  if (options.rope.has_value()) rope(context_, heads, *options.rope, positions, heads);
}

ConstTensorView Pass::alibi_slopes() const {
  const MultiHeadAttentionOptions& options = layer_.options();
  if (options.alibi_slopes.empty()) return {};
  return {options.alibi_slopes.data(), DType::kF64, {options.num_heads}};
}

AttentionOptions Pass::attention_options(std::optional<bool> causal) const {
  const MultiHeadAttentionOptions& options = layer_.options();
  AttentionOptions attention;
  attention.scale = options.scale;
  attention.causal = causal.value_or(options.causal);
  attention.window_left = options.window_left;
  attention.window_right = options.window_right;
  attention.softcap = options.softcap;
  attention.alibi_slopes = alibi_slopes();
  if (options.sinks) attention.sinks = weight("sinks");
  return attention;
}

}  // namespace ladon::multi_head
