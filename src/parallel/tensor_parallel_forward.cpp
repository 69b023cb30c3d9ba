// Forward of TensorParallelAttention: own heads, all attended values, own rows of the output
// projection, all outputs.

#include <memory>
#include <optional>
#include <utility>

#include "attention/attend.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "layers/cached_tokens.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "TensorParallelAttention::forward";

/// All outputs, [rows, embed_dim], from all attended values.
Tensor project_out(const Context& context, CollectiveCall& call, const LayerHeads& heads,
                   const ConstTensorView& all_attended) {
  const MultiHeadAttentionOptions& options = heads.options;
  const std::int64_t own = share_of(options.embed_dim, call.rank(), call.size()).length();
  Tensor y = Tensor::uninitialized(context, options.dtype, {all_attended.size(0), own});
  Steps(context, heads).project_rows(all_attended, heads.plan.out, y);
  return gather_columns(context, call, y, options.embed_dim);
}

void describe_positions(CallSignature& signature, std::string_view name,
                        const RopePositions& positions) {
  signature.add(std::string(name) + ".first", positions.first);
  signature.add(name, positions.explicit_positions);
}

/// The temporaries of a cached call: rows of all new tokens.
struct Temporaries {
  Temporaries(Arena& arena, const CachedTokens& tokens, const MultiHeadAttentionOptions& own,
              const ConstTensorView& x, const CachedCall& call, const TensorView& out)
      : rows(arena, tokens, x, call, out),
        q(arena.take_rows(tokens.total, own.num_heads * own.head_dim, own.dtype)),
        k(arena.take_rows(tokens.total, own.num_kv_heads * own.head_dim, own.dtype)),
        v(arena.take_rows(tokens.total, own.num_kv_heads * own.head_dim, own.dtype)),
        attended(arena.take_rows(tokens.total, own.num_heads * own.head_dim, own.dtype)) {}

  TokenRows rows;
  TensorView q, k, v, attended;
};

}  // namespace

Tensor TensorParallelAttention::forward_ranks(const Context& context, const LayerInputs& inputs,
                                              const LayerCall& call, SavedForward* saved) const {
  const Operation operation(kOperation, context);
  const LayerHeads heads(*this, own_, *plan_, alibi_slopes_, first_head_,
                         whole_.num_heads / whole_.num_kv_heads);
  std::optional<CheckedInputs> checked;
  Tensor out;
  std::unique_ptr<TensorParallelSaved> kept;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        checked = check_call(operation, *this, whole_, inputs, call);
        if (!call.weights.absent()) {
          fail(ErrorCode::kUnsupported, operation, "weights",
               "got a tensor, expected none: each rank has the weights of its own heads alone");
        }
        describe_layer(context, *this, signature);
        signature.add("query", checked->query);
        signature.add("key", checked->self ? ConstTensorView() : checked->key);
        signature.add("value", checked->own_value ? checked->value : ConstTensorView());
        signature.add("causal", std::int64_t{call.causal.value_or(whole_.causal)});
        signature.add("mask", call.mask);
        signature.add("bias", call.bias);
        signature.add("kv_lengths", call.kv_lengths);
        signature.add("dropout_seed", std::to_string(call.dropout_seed));
        signature.add("saves", std::int64_t{saved != nullptr});
        describe_positions(signature, "query_positions", call.query_positions);
        describe_positions(signature, "key_positions", call.key_positions);
      },
      [&](CollectiveCall& ranks) {
        LayerCall own_call = call;
        const Share share{first_head_, first_head_ + own_.num_heads};
        own_call.mask = slice_heads(call.mask, share);
        own_call.bias = slice_heads(call.bias, share);
        AttendedHeads attended = attend_heads(context, heads, *checked, own_call, saved != nullptr);
        Tensor all = gather_columns(context, ranks, merged(std::as_const(attended.attended)),
                                    whole_.num_heads * whole_.head_dim);
        out = project_out(context, ranks, heads, all);
        if (saved == nullptr) return;
        kept = std::make_unique<TensorParallelSaved>(*this, identity_);
        keep_forward(context, *checked, own_call, attended, *kept);
        kept->all_attended = std::move(all);
      },
      [] {});
  if (saved != nullptr) *saved = SavedForward(std::move(kept));
  const std::int64_t seq = checked->query.size(1);
  const Dims shape =
      checked->batched ? Dims{checked->query.size(0), seq, embed_dim()} : Dims{seq, embed_dim()};
  Tensor result = Tensor::uninitialized(context, dtype(), shape);
  copy(context, out.view().reshape(shape), result);
  context.synchronize();
  return result;
}

Tensor TensorParallelAttention::forward(const Context& context, const LayerInputs& inputs,
                                        const LayerCall& call) const {
  return forward_ranks(context, inputs, call, nullptr);
}

TrainingForward TensorParallelAttention::forward_training(const Context& context,
                                                          const LayerInputs& inputs,
                                                          const LayerCall& call) const {
  SavedForward saved;
  Tensor out = forward_ranks(context, inputs, call, &saved);
  return {std::move(out), std::move(saved)};
}

void TensorParallelAttention::forward(const Context& context, const ConstTensorView& x,
                                      KvCache& cache, const CachedCall& call,
                                      const TensorView& out) const {
  const Operation operation(kOperation, context);
  const LayerHeads heads(*this, own_, *plan_, alibi_slopes_, first_head_,
                         whole_.num_heads / whole_.num_kv_heads);
  CachedTokens tokens;
  std::optional<InWorkspace<RowLists>> lists;
  std::optional<InWorkspace<Temporaries>> temporaries;
  std::optional<KvAppend> appended;
  Tensor result;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        tokens = check_cached_call(operation, *this, x, cache, call, out);
        check_cached_layer(operation, *this, whole_, cache);
        describe_layer(context, *this, signature);
        signature.add("x", x);
        signature.add("causal", std::int64_t{call.causal.value_or(whole_.causal)});
        signature.add("new_lengths", call.new_lengths);
        signature.add("query", call.query);
        signature.add("query_positions", call.query_positions);
        signature.add("mask", call.mask);
        signature.add("bias", call.bias);
        std::vector<std::int64_t> lengths;
        for (std::int64_t b = 0; b < cache.batch(); ++b) lengths.push_back(cache.length(b));
        signature.add("cache lengths", lengths);
        signature.add("cache format", name_of(cache.options().format.dtype));
      },
      [&](CollectiveCall& ranks) {
        if (tokens.batch == 0) return;
        const Steps steps(context, heads);
        lists.emplace(context.impl().host_scratch(), tokens);
        (*lists)->fill(tokens, cache);
        temporaries.emplace(backend_of(context).scratch(), tokens, own_, x, call, out);
        const Temporaries& t = **temporaries;
        steps.project_new_tokens(t.rows.inputs(context, tokens, **lists), **lists, t.q, t.k, t.v);
        appended.emplace(context, cache, heads_of_rows(t.k, own_.num_kv_heads),
                         heads_of_rows(t.v, own_.num_kv_heads), (*lists)->counts);
        AttentionOptions options = steps.attention_options(call.causal);
        const Share share{first_head_, first_head_ + own_.num_heads};
        options.mask = slice_heads(call.mask, share);
        options.bias = slice_heads(call.bias, share);
        options.query_offsets = (*lists)->offsets;
        attend(context, heads_of_rows(t.q, own_.num_heads), appended->view(), options,
               heads_of_rows(t.attended, own_.num_heads), {.group = heads.whole_group});
        const Tensor all =
            gather_columns(context, ranks, t.attended, whole_.num_heads * whole_.head_dim);
        result = project_out(context, ranks, heads, all);
      },
      [&] {
        if (tokens.batch == 0) return;
        const Temporaries& t = **temporaries;
        copy(context, result, t.rows.output());
        t.rows.finish(context, tokens, **lists, out);
        appended->commit();
        context.synchronize();
      });
}

}  // namespace ladon
