// More KV heads by repetition: rows are copied, bit by bit.
#include "convert/repeat.h"

#include <string>

#include "convert/host_context.h"
#include "core/checks.h"

namespace ladon {
namespace convert {

MultiHeadAttention repeat_kv_heads(const Context& context, const MultiHeadAttention& layer,
                                   std::int64_t num_kv_heads) {
  const HostContext host(context);
  MultiHeadAttentionOptions options = layer.options();
  options.num_kv_heads = num_kv_heads;
  MultiHeadAttention result = MultiHeadAttention::zeros(options);
  const std::int64_t repeats = num_kv_heads / layer.num_kv_heads();
  for (Parameter& parameter : result.named_parameters()) {
    const Tensor source = layer.parameter(parameter.name).value.to_host();
    // A norm over all heads has a weight for each; repeated heads have the same mean of squares.
    const bool is_key_norm = parameter.name == "k_norm.weight";
    const bool per_kv_head = parameter.name.starts_with("k_proj") ||
                             parameter.name.starts_with("v_proj") ||
                             (is_key_norm && options.qk_norm_span != QkNormSpan::kHead);
    if (!per_kv_head) {
      copy(host, source, parameter.value);
      continue;
    }
    const bool is_row = is_key_norm && options.qk_norm_span == QkNormSpan::kEachHead;
    const std::int64_t dim = is_row ? 1 : layer.head_dim();
    for (std::int64_t head = 0; head < num_kv_heads; ++head) {
      const std::int64_t from = head / repeats;
      copy(host, source.view().slice(0, from * dim, (from + 1) * dim),
           parameter.value.view().slice(0, head * dim, (head + 1) * dim));
    }
  }
  result.train(layer.is_training());
  result.to(context);
  return result;
}

}  // namespace convert

MultiHeadAttention to_mha(const Context& context, const MultiHeadAttention& layer) {
  check_device(Operation("to_mha", context), "layer", layer.device());
  return convert::repeat_kv_heads(context, layer, layer.num_heads());
}

}  // namespace ladon
