// Forward of MultiHeadAttention over a KvCache.

#include <string>

#include "core/attention_params.h"
#include "core/fail.h"
#include "layers/cached_tokens.h"
#include "layers/multi_head.h"
#include "layers/projection.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::forward";

void check_layer(const MultiHeadAttention& layer, const KvCache& cache) {
  const MultiHeadAttentionOptions& options = layer.options();
  if (options.window_left.value_or(kNoWindow) > cache.window_left()) {
    fail(kOperation, "cache",
         "got a window of " + std::to_string(cache.window_left()) + ", expected " +
             (options.window_left.has_value()
                  ? "at least the layer's " + std::to_string(*options.window_left)
                  : "one that keeps every token, because the layer has no window_left"));
  }
  if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
    fail(kOperation, "cache",
         "got one for a layer of cross-attention, expected key_dim and value_input_dim to be "
         "embed_dim");
  }
  if (layer.is_training() && options.dropout > 0) {
    fail(kOperation, "cache", "got one while the layer trains with dropout, expected eval() first");
  }
}

/// [rows, heads * head_dim] as [1, rows, heads, head_dim].
TensorView heads_of(const TensorView& rows, std::int64_t heads) {
  return rows.reshape({1, rows.size(0), heads, rows.size(1) / heads});
}

}  // namespace

void MultiHeadAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                                 const CachedCall& call, const TensorView& out) const {
  const CachedTokens tokens = check_cached_call(kOperation, *this, x, cache, call, out);
  check_layer(*this, cache);
  if (tokens.batch == 0) return;

  const Pass pass(context, *this);
  // q, k, v and what they attend to; x and out, where their rows do not lie side by side.
  const std::int64_t width = 2 * (num_heads() + num_kv_heads()) * head_dim() + 2 * embed_dim();
  CachedRows rows(context, tokens, cache, CachedRows::bytes_of_rows(tokens, width, dtype()));
  const ConstTensorView input = rows.input(x);
  const auto project_heads = [&](std::string_view weight, std::string_view bias,
                                 std::int64_t heads) {
    const TensorView y = rows.take(tokens.total, heads * head_dim(), dtype());
    project(context, input, pass.weight(weight), pass.weight(bias), y);
    return heads_of(y, heads);
  };
  const TensorView q = project_heads("q_proj.weight", "q_proj.bias", num_heads());
  const TensorView k = project_heads("k_proj.weight", "k_proj.bias", num_kv_heads());
  const TensorView v = project_heads("v_proj.weight", "v_proj.bias", num_kv_heads());
  const RopePositions positions{.explicit_positions = rows.positions()};
  pass.place(q, "q_norm.weight", positions);
  pass.place(k, "k_norm.weight", positions);

  KvAppend appended(cache, k, v, rows.counts());
  AttentionOptions options = pass.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.query_offsets = rows.offsets();
  const TensorView attended = rows.take(tokens.total, num_heads() * head_dim(), dtype());
  attention(context, q, appended.view(), options, heads_of(attended, num_heads()));

  const TensorView result = rows.output(out);
  project(context, attended, pass.weight("out_proj.weight"), pass.weight("out_proj.bias"), result);
  rows.finish(result, out);
  appended.commit();
}

}  // namespace ladon
