// Forward of MultiHeadAttention over a KvCache.

#include <string>

#include "attention/attend.h"
#include "core/attention_params.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "layers/cached_tokens.h"
#include "layers/multi_head.h"

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

/// The temporaries of a call: rows of all new tokens.
struct Temporaries {
  Temporaries(Arena& arena, const CachedTokens& tokens, const MultiHeadAttention& layer,
              const ConstTensorView& x, const CachedCall& call, const TensorView& out)
      : rows(arena, tokens, x, call, out),
        q(take(arena, tokens, layer, layer.num_heads())),
        k(take(arena, tokens, layer, layer.num_kv_heads())),
        v(take(arena, tokens, layer, layer.num_kv_heads())),
        attended(take(arena, tokens, layer, layer.num_heads())) {}

  static TensorView take(Arena& arena, const CachedTokens& tokens, const MultiHeadAttention& layer,
                         std::int64_t heads) {
    return arena.take_rows(tokens.total, heads * layer.head_dim(), layer.dtype());
  }

  TokenRows rows;
  TensorView q, k, v, attended;
};

/// [rows, heads * head_dim] as [1, rows, heads, head_dim].
TensorView heads_of(const TensorView& rows, std::int64_t heads) {
  return rows.reshape({1, rows.size(0), heads, rows.size(1) / heads});
}

}  // namespace

void MultiHeadAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                                 const CachedCall& call, const TensorView& out) const {
  const CachedTokens tokens =
      check_cached_call(Operation(kOperation, context), *this, x, cache, call, out);
  check_layer(*this, cache);
  if (tokens.batch == 0) return;

  const Steps steps(context, *this);
  InWorkspace<RowLists> lists(context.impl().host_scratch(), tokens);
  lists->fill(tokens, cache);
  const InWorkspace<Temporaries> t(backend_of(context).scratch(), tokens, *this, x, call, out);
  const TokenRows::Inputs inputs = t->rows.inputs(context, tokens, *lists);
  steps.project_rows(inputs.queries, plan_->query, t->q);
  steps.project_rows(inputs.tokens, plan_->key, t->k);
  steps.project_rows(inputs.tokens, plan_->value, t->v);
  const TensorView q = heads_of(t->q, num_heads());
  const TensorView k = heads_of(t->k, num_kv_heads());
  steps.norm_and_rope(q, plan_->query_norm, {.explicit_positions = lists->query_positions});
  steps.norm_and_rope(k, plan_->key_norm, {.explicit_positions = lists->positions});

  KvAppend appended(context, cache, k, heads_of(t->v, num_kv_heads()), lists->counts);
  AttentionOptions options = steps.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.query_offsets = lists->offsets;
  attend(context, q, appended.view(), options, heads_of(t->attended, num_heads()));

  steps.project_rows(t->attended, plan_->out, t->rows.output());
  t->rows.finish(context, tokens, *lists, out);
  appended.commit();
}

}  // namespace ladon
