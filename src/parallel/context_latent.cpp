// Context-parallel LatentAttention: every rank makes the queries and latents of its own tokens,
// gathers the latents that its queries may see, and attends as one process would, expanding the
// keys and values of a few heads at a time. Backward gathers the latents again, and returns the
// gradients of latents to their owners, who add them in the order of ranks.

#include "ladon/context_parallel_latent.h"

#include <memory>
#include <optional>
#include <utility>

#include "attention/attend.h"
#include "core/fail.h"
#include "layers/latent_backward.h"
#include "layers/layer_output.h"
#include "parallel/latent_context.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace latent;

/// For the library's own use: what only a layer knows.
class LatentContextAccess {
 public:
  static const std::shared_ptr<const char>& identity(const LatentAttention& layer) {
    return layer.identity_;
  }
};

namespace {

struct ForwardOutputs {
  LayerOutput& out;
  SavedForward* saved = nullptr;  // of forward_training()
};

void forward_ranks(const Context& context, Communicator& communicator, const LatentAttention& layer,
                   const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call,
                   const ForwardOutputs& outputs) {
  LayerOutput& out = outputs.out;
  SavedForward* const saved = outputs.saved;
  const Operation operation("context_parallel_forward", context);
  std::optional<LatentContext> own;
  Tensor result;
  std::unique_ptr<ContextSaved> kept;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        own.emplace(operation, context, communicator, layer, inputs, plan, call);
        check_output(operation, layer, inputs, call, out);
        own->describe(signature);
        describe_call(signature, call, layer.options().causal);
        signature.add("saves", std::int64_t{saved != nullptr});
      },
      [&](CollectiveCall& ranks) {
        AttendedHeads heads = project_heads(context, layer, own->inputs(), own->own_call());
        const Dims& shape = heads.queries.shape();
        heads.options = own->options();
        heads.attended = Tensor::uninitialized(context, layer.dtype(),
                                               {shape[0], shape[1], shape[2], layer.value_dim()});
        const AttentionSizes& sizes = own->whole().sizes();
        const Tensor latents = own->gather(ranks, heads.latents);
        const bool absorbs = saved == nullptr &&
                             layer.form_for(sizes.query_len, sizes.kv_len) == LatentForm::kAbsorbed;
        if (saved != nullptr) {
          heads.lse = Tensor::uninitialized(context, compute_dtype(layer.dtype()),
                                            {shape[0], shape[2], shape[1]});
        }
        if (absorbs) {
          own->attend_absorbed(latents, heads);
        } else {
          own->attend_expanded(latents, heads);
        }
        result = Tensor::uninitialized(context, layer.dtype(), inputs.query.shape());
        Steps(context, layer)
            .project_out(merged(std::as_const(heads.attended)), as_rows(result.view()));
        context.synchronize();
        if (saved == nullptr) return;
        kept = std::make_unique<ContextSaved>(layer, LatentContextAccess::identity(layer));
        kept->batched = inputs.query.rank() == 3;
        kept->plan = own->plan();
        keep_forward(context, own->inputs(), own->own_call(), heads, *kept);
      },
      [&] { out.publish(context, std::move(result)); });
  if (saved != nullptr) *saved = SavedForward(std::move(kept));
  context.synchronize();
}

void backward_ranks(const Context& context, Communicator& communicator, LatentAttention& layer,
                    const ConstTensorView& grad_out, const SavedForward& saved,
                    InputGradientOutputs& gradients) {
  const Operation operation("context_parallel_backward", context);
  const ContextSaved* state = nullptr;
  std::optional<LatentContext> own;
  std::optional<HeadsBackward> backward;
  InputGradientOutputs results;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        state = dynamic_cast<const ContextSaved*>(&check_backward<Saved>(
            operation, layer, saved, LatentContextAccess::identity(layer), grad_out, gradients));
        if (state == nullptr) {
          fail(operation, "saved",
               "got what forward_training() saved, expected context_parallel_forward_training()");
        }
        own.emplace(operation, context, communicator, layer, *state);
        own->describe(signature);
      },
      [&](CollectiveCall& call) {
        backward.emplace(context, layer, layer, *state, [](const TensorView&) {});
        const Tensor dattended = backward->out_back(grad_out);
        const DType sums = compute_dtype(layer.dtype());
        const Tensor latents = own->gather(call, state->latents);
        Tensor dqueries = Tensor::uninitialized(context, layer.dtype(), state->queries.shape());
        Tensor terms(context, sums, latents.shape());  // of the gradients of all latents
        own->for_each_expanded(latents, [&](const Range& heads, const Tensor& keys,
                                            const Tensor& values) {
          Tensor dkeys(context, sums, keys.shape());
          Tensor dvalues(context, sums, values.shape());
          own->for_each_piece([&](const QueryPiece& piece) {
            const auto of = [&](const ConstTensorView& view) { return own->keys_of(piece, view); };
            const ConstTensorView k = of(keys);
            const ConstTensorView v = of(values);
            Tensor dk = Tensor::uninitialized(context, sums, k.shape());
            Tensor dv = Tensor::uninitialized(context, sums, v.shape());
            attend_backward(
                context, ladon::rows_of(state->queries.view(), piece, heads), k, v,
                own->whole().options_of(piece, heads),
                {.out = ladon::rows_of(state->attended.view(), piece, heads),
                 .lse = lse_of(state->lse.view(), piece, heads),
                 .dout = ladon::rows_of(dattended.view(), piece, heads)},
                {.dq = ladon::rows_of(dqueries.view(), piece, heads), .dk = dk, .dv = dv});
            add_to(context, dk, own->keys_of(piece, dkeys.view()));
            add_to(context, dv, own->keys_of(piece, dvalues.view()));
            context.synchronize();
          });
          const Tensor rounded_dkeys = Tensor::copy_of(context, dkeys, layer.dtype());
          const Tensor rounded_dvalues = Tensor::copy_of(context, dvalues, layer.dtype());
          backward->expansion_back(rows_of(latents), heads.begin, rounded_dkeys, rounded_dvalues,
                                   rows_of(terms));
          if (layer.rope_dim() == 0) return;
          Tensor drope(context, sums, {terms.size(0) * terms.size(1), layer.rope_dim()});
          backward->sum_rope_keys(rounded_dkeys, drope);
          add_to(context, drope, rows_of(terms).slice(1, layer.kv_rank(), layer.latent_dim()));
          context.synchronize();
        });
        Tensor dlatents = Tensor::uninitialized(context, sums, state->latents.shape());
        ReturnedTerms returned(context, own->whole(), call.rank());
        returned.add(std::move(terms), dlatents);
        ArrayExchange exchange(call);
        exchange.begin({&returned});
        backward->queries_back(dqueries);
        exchange.finish();
        backward->latents_back(dlatents);
        const auto count = static_cast<int>(layer.named_parameters().size());
        for (int i = 0; i < count; ++i) {
          sum_over_ranks(context, call, backward->pending().of(i), 0, call.size());
        }
        results = gradients.staged();
        backward->finish(results);
        context.synchronize();
      },
      [&] {
        gradients.publish(context, results.take());
        backward->pending().commit();
        context.synchronize();
      });
}

}  // namespace

Tensor context_parallel_forward(const Context& context, Communicator& communicator,
                                const LatentAttention& layer, const LayerInputs& inputs,
                                const ContextPlan& plan, const LayerCall& call) {
  LayerOutput out;
  forward_ranks(context, communicator, layer, inputs, plan, call, {out});
  return out.take();
}

void context_parallel_forward(const Context& context, Communicator& communicator,
                              const LatentAttention& layer, const LayerInputs& inputs,
                              const ContextPlan& plan, const LayerCall& call,
                              const TensorView& out) {
  LayerOutput given(out);
  forward_ranks(context, communicator, layer, inputs, plan, call, {given});
}

TrainingForward context_parallel_forward_training(const Context& context,
                                                  Communicator& communicator,
                                                  const LatentAttention& layer,
                                                  const LayerInputs& inputs,
                                                  const ContextPlan& plan, const LayerCall& call) {
  LayerOutput out;
  SavedForward saved;
  forward_ranks(context, communicator, layer, inputs, plan, call, {out, &saved});
  return {out.take(), std::move(saved)};
}

SavedForward context_parallel_forward_training(const Context& context, Communicator& communicator,
                                               const LatentAttention& layer,
                                               const LayerInputs& inputs, const ContextPlan& plan,
                                               const LayerCall& call, const TensorView& out) {
  LayerOutput given(out);
  SavedForward saved;
  forward_ranks(context, communicator, layer, inputs, plan, call, {given, &saved});
  return saved;
}

InputGradients context_parallel_backward(const Context& context, Communicator& communicator,
                                         LatentAttention& layer, const ConstTensorView& grad_out,
                                         const SavedForward& saved) {
  InputGradientOutputs gradients;
  backward_ranks(context, communicator, layer, grad_out, saved, gradients);
  return gradients.take();
}

void context_parallel_backward(const Context& context, Communicator& communicator,
                               LatentAttention& layer, const ConstTensorView& grad_out,
                               const SavedForward& saved, const InputGradientViews& gradients) {
  InputGradientOutputs given(gradients);
  backward_ranks(context, communicator, layer, grad_out, saved, given);
}

}  // namespace ladon
