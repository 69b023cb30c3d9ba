#include "layers/multi_head.h"

#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon::multi_head {

InputRows::InputRows(const ConstTensorView& x) {
  const std::int64_t rows = x.size(0) * x.size(1);
  if (x.size(0) <= 1 || x.size(1) <= 1 || x.stride(0) == x.size(1) * x.stride(1)) {
    const std::int64_t stride = x.size(1) > 1 ? x.stride(1) : x.stride(0);
    view_ = ConstTensorView(x.data(), x.dtype(), {rows, x.size(2)}, {stride, 1});
  } else {
    copy_ = Tensor::copy_of(x);
    view_ = ConstTensorView(copy_).reshape({rows, x.size(2)});
  }
}

TensorView rows_of(Tensor& tensor) {
  const std::int64_t width = tensor.size(tensor.rank() - 1);
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), width});
}

TensorView merged(Tensor& tensor) {
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), tensor.size(2) * tensor.size(3)});
}
ConstTensorView merged(const Tensor& tensor) {
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), tensor.size(2) * tensor.size(3)});
}

ConstTensorView with_batch(const ConstTensorView& x) {
  if (x.rank() == 3) return x;
  return {x.data(), x.dtype(), {1, x.size(0), x.size(1)}, {0, x.stride(0), x.stride(1)}};
}

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

void Pass::place(Tensor& heads, std::string_view norm, const RopePositions& positions) const {
  const MultiHeadAttentionOptions& options = layer_.options();
  if (options.qk_norm) rms_norm(context_, heads, weight(norm), options.qk_norm_epsilon, heads);
  if (options.rope.has_value()) rope(context_, heads, *options.rope, positions, heads);
}

ConstTensorView Pass::alibi_slopes() const {
  const MultiHeadAttentionOptions& options = layer_.options();
  if (options.alibi_slopes.empty()) return {};
  return {options.alibi_slopes.data(), DType::kF64, {options.num_heads}};
}

AttentionOptions Pass::attention_options(const LayerCall& call) const {
  const MultiHeadAttentionOptions& options = layer_.options();
  AttentionOptions attention;
  attention.scale = options.scale;
  attention.causal = call.causal.value_or(options.causal);
  attention.window_left = options.window_left;
  attention.window_right = options.window_right;
  attention.mask = call.mask;
  attention.bias = call.bias;
  attention.kv_lengths = call.kv_lengths;
  attention.softcap = options.softcap;
  attention.alibi_slopes = alibi_slopes();
  if (options.sinks) attention.sinks = weight("sinks");
  if (layer_.is_training()) {
    attention.dropout = {.probability = options.dropout, .seed = call.dropout_seed};
  }
  return attention;
}

}  // namespace ladon::multi_head
