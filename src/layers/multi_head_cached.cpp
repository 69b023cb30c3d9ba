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

}  // namespace

void multi_head::check_cached_layer(const Operation& operation, const AttentionLayer& layer,
                                    const MultiHeadAttentionOptions& options,
                                    const KvCache& cache) {
  if (options.window_left.value_or(kNoWindow) > cache.window_left()) {
    fail(operation, "cache",
         "got a window of " + std::to_string(cache.window_left()) + ", expected " +
             (options.window_left.has_value()
                  ? "at least the layer's " + std::to_string(*options.window_left)
                  : "one that keeps every token, because the layer has no "
                    "window_left"));
  }
  if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
    fail(operation, "cache",
         "got one for a layer of cross-attention, expected key_dim and "
         "value_input_dim to be "
         "embed_dim");
  }
  if (layer.is_training() && options.dropout > 0) {
    fail(operation, "cache", "got one while the layer trains with dropout, expected eval() first");
  }
}

void MultiHeadAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                                 const CachedCall& call, const TensorView& out) const {
  const Operation operation(kOperation, context);
  const CachedTokens tokens = check_cached_call(operation, *this, x, cache, call, out);
  check_cached_layer(operation, *this, options_, cache);
  if (tokens.batch == 0) return;

  const Steps steps(context, *this);
  InWorkspace<RowLists> lists(context.impl().host_scratch(), tokens);
  lists->fill(tokens);
  const InWorkspace<Temporaries> t(backend_of(context).scratch(), tokens, *this, x, call, out);
  const NewTokenRotations rotations =
      steps.project_new_tokens(t->rows.inputs(context, tokens, *lists), *lists, t->q, t->k, t->v);
  const TensorView q = heads_of_rows(t->q, num_heads());
  const TensorView k = heads_of_rows(t->k, num_kv_heads());

  KvAppend appended(context, cache, k, heads_of_rows(t->v, num_kv_heads()), lists->counts,
                    steps.append_steps(rotations));
  AttentionOptions options = steps.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.query_offsets = lists->offsets;
  attend(context, q, appended.view(), options, heads_of_rows(t->attended, num_heads()));

  steps.project_rows(t->attended, plan_->out, t->rows.output());
  t->rows.finish(context, tokens, *lists, out);
  appended.commit();
}

}  // namespace ladon
