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

/// Among all heads of the layer.
Range range_of(const LayerHeads& heads) {
  return {heads.first_head, heads.first_head + heads.options.num_heads};
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

void TensorParallelAttention::run_forward(const Context& context, const LayerInputs& inputs,
                                          const LayerCall& call, LayerOutput& out,
                                          SavedForward* saved) const {
  const Operation operation(kOperation, context);
  const LayerHeads heads = own_heads();
  std::optional<CheckedInputs> checked;
  Tensor result;
  std::unique_ptr<TensorParallelSaved<Saved>> kept;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        checked = check_call(operation, *this, whole_, inputs, call);
        check_no_weights(operation, call);
        check_output(operation, *this, inputs, call, out);
        describe(context, signature);
        signature.add("query", checked->query);
        signature.add("key", checked->self ? ConstTensorView() : checked->key);
        signature.add("value", checked->own_value ? checked->value : ConstTensorView());
        describe_call(signature, call, whole_.causal);
        signature.add("saves", std::int64_t{saved != nullptr});
      },
      [&](CollectiveCall& ranks) {
        const LayerCall own_call = of_heads(call, range_of(heads));
        AttendedHeads attended = attend_heads(context, heads, *checked, own_call, saved != nullptr);
        Tensor all = gather_columns(context, ranks, merged(std::as_const(attended.attended)),
                                    whole_.num_heads * whole_.head_dim);
        result = with_shape(context, project_out(context, ranks, *this, plan_->out, all),
                            inputs.query.shape());
        if (saved == nullptr) return;
        kept = std::make_unique<TensorParallelSaved<Saved>>(*this, identity_);
        keep_forward(context, *checked, own_call, attended, *kept);
        kept->all_attended = std::move(all);
      },
      [&] { out.publish(context, std::move(result)); });
  if (saved != nullptr) *saved = SavedForward(std::move(kept));
  context.synchronize();
}

void TensorParallelAttention::forward(const Context& context, const ConstTensorView& x,
                                      KvCache& cache, const CachedCall& call,
                                      const TensorView& out) const {
  const Operation operation(kOperation, context);
  const LayerHeads heads = own_heads();
  CachedTokens tokens;
  std::optional<InWorkspace<RowLists>> lists;
  std::optional<InWorkspace<Temporaries>> temporaries;
  std::optional<KvAppend> appended;
  Tensor result;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        tokens = check_cached_call(operation, *this, x, cache, call, out);
        check_cached_layer(operation, *this, whole_, cache);
        describe(context, signature);
        describe_call(signature, x, tokens, call, whole_.causal);
        signature.add("cache format", name_of(cache.options().format.dtype));
      },
      [&](CollectiveCall& ranks) {
        if (tokens.batch == 0) return;
        const Steps steps(context, heads);
        lists.emplace(context.impl().host_scratch(), tokens);
        (*lists)->fill(tokens);
        temporaries.emplace(backend_of(context).scratch(), tokens, own_, x, call, out);
        const Temporaries& t = **temporaries;
        const NewTokenRotations rotations = steps.project_new_tokens(
            t.rows.inputs(context, tokens, **lists), **lists, t.q, t.k, t.v);
        appended.emplace(context, cache, heads_of_rows(t.k, own_.num_kv_heads),
                         heads_of_rows(t.v, own_.num_kv_heads), (*lists)->counts,
                         steps.append_steps(rotations));
        AttentionOptions options = steps.attention_options(call.causal);
        const CachedCall own_call = of_heads(call, range_of(heads));
        options.mask = own_call.mask;
        options.bias = own_call.bias;
        options.query_offsets = (*lists)->offsets;
        attend(context, heads_of_rows(t.q, own_.num_heads), appended->view(), options,
               heads_of_rows(t.attended, own_.num_heads), {}, {.group = heads.whole_group});
        const Tensor all =
            gather_columns(context, ranks, t.attended, whole_.num_heads * whole_.head_dim);
        result = project_out(context, ranks, *this, plan_->out, all);
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
