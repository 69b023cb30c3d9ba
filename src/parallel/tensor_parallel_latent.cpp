// TensorParallelLatentAttention. Every rank makes all latents; queries, keys, values and attention
// are those of its own heads. In backward ranks add what their heads give to the gradients of the
// latents; from there on all of them compute the same, so that what several ranks have gets the
// same gradient on each.

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/fail.h"
#include "layers/latent_backward.h"
#include "layers/latent_cached.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "TensorParallelLatentAttention";

LatentAttentionOptions slice_options(LatentAttentionOptions options, int ranks) {
  if (options.num_heads % ranks != 0) {
    fail(kOperation, "num_heads",
         "got " + std::to_string(options.num_heads) + " for " + std::to_string(ranks) +
             " ranks, expected a multiple of the ranks");
  }
  options.num_heads /= ranks;
  return options;
}

/// In signatures; what parameters show is left out.
std::string describe_options(const LatentAttentionOptions& options) {
  CallSignature signature;
  signature.add("num_heads", options.num_heads);
  signature.add("kv_rank", options.kv_rank);
  signature.add("nope_dim", options.nope_dim);
  signature.add("rope_dim", options.rope_dim);
  signature.add("value_dim", options.value_dim);
  signature.add("norm_epsilon", options.norm_epsilon);
  signature.add("causal", std::int64_t{options.causal});
  signature.add("scale", options.scale.value_or(0));
  signature.add("dropout", options.dropout);
  signature.add("form", static_cast<std::int64_t>(options.form));
  if (options.rope_dim != 0) describe_rope(signature, options.rope, options.rope_dim);
  return signature.text();
}

Range range_of(const LatentHeads& heads) {
  return {heads.first_head, heads.first_head + heads.num_heads()};
}

}  // namespace

TensorParallelLatentAttention::TensorParallelLatentAttention(Communicator& communicator,
                                                             const LatentAttentionOptions& options)
    : TensorParallelLayer(communicator),
      whole_(complete_options(options)),
      own_(slice_options(whole_, communicator.size())),
      first_head_(own_.num_heads * communicator.rank()),
      identity_(std::make_shared<const char>()) {
  for (const auto& [name, shape] : plan_parameters(whole_)) {
    const bool by_heads = name.starts_with("q_proj") || name.starts_with("q_b_proj") ||
                          name.starts_with("kv_b_proj") || name.starts_with("o_proj");
    Parameter& made = add_parameter(name, whole_.dtype, shape, by_heads ? communicator.size() : 1);
    if (name.ends_with("_layernorm.weight")) fill_weight(made, 1, 1);
  }
  plan_ = std::make_shared<const LatentAttention::Plan>(own_, parameters_);
  description_ = describe_options(whole_);
}

TensorParallelLatentAttention::~TensorParallelLatentAttention() = default;

LatentHeads TensorParallelLatentAttention::own_heads() const {
  return {*this, own_, *plan_, first_head_, whole_.num_heads};
}

KvCacheOptions TensorParallelLatentAttention::cache_options(std::int64_t batch,
                                                            std::optional<KvFormat> format) const {
  return latent::cache_options(whole_, batch, format);
}

void TensorParallelLatentAttention::run_forward(const Context& context, const LayerInputs& inputs,
                                                const LayerCall& call, LayerOutput& out,
                                                SavedForward* saved) const {
  const Operation operation("TensorParallelLatentAttention::forward", context);
  const LatentHeads heads = own_heads();
  CheckedInputs checked;
  Tensor result;
  std::unique_ptr<TensorParallelSaved<Saved>> kept;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        checked = check_call(operation, *this, whole_, inputs, call);
        check_no_weights(operation, call);
        check_output(operation, *this, inputs, call, out);
        describe(context, signature);
        signature.add("query", inputs.query);
        signature.add("key", inputs.key);
        describe_call(signature, call, whole_.causal);
        signature.add("saves", std::int64_t{saved != nullptr});
      },
      [&](CollectiveCall& ranks) {
        const LayerCall own_call = of_heads(call, range_of(heads));
        AttendedHeads attended = attend_heads(context, heads, checked, own_call, saved != nullptr);
        Tensor all = gather_columns(context, ranks, merged(std::as_const(attended.attended)),
                                    whole_.num_heads * whole_.value_dim);
        result = with_shape(context, project_out(context, ranks, *this, plan_->out, all),
                            inputs.query.shape());
        if (saved == nullptr) return;
        kept = std::make_unique<TensorParallelSaved<Saved>>(*this, identity_);
        kept->batched = inputs.query.rank() == 3;
        keep_forward(context, checked, own_call, attended, *kept);
        kept->all_attended = std::move(all);
      },
      [&] { out.publish(context, std::move(result)); });
  if (saved != nullptr) *saved = SavedForward(std::move(kept));
  context.synchronize();
}

void TensorParallelLatentAttention::forward(const Context& context, const ConstTensorView& x,
                                            KvCache& cache, const CachedCall& call,
                                            const TensorView& out) const {
  const Operation operation("TensorParallelLatentAttention::forward", context);
  CachedTokens tokens;
  CachedCall own_call = call;
  std::optional<CachedHeads> heads;
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
        own_call = of_heads(call, range_of(own_heads()));
        heads.emplace(context, own_heads(), own_call, tokens, x, cache.options().format.dtype, out);
        heads->run(cache);
        const Tensor all =
            gather_columns(context, ranks, heads->attended(), whole_.num_heads * whole_.value_dim);
        result = project_out(context, ranks, *this, plan_->out, all);
      },
      [&] {
        if (tokens.batch == 0) return;
        copy(context, result, heads->output());
        heads->commit(out);
        context.synchronize();
      });
}

void TensorParallelLatentAttention::run_backward(const Context& context,
                                                 const ConstTensorView& grad_out,
                                                 const SavedForward& saved,
                                                 InputGradientOutputs& gradients) {
  const Operation operation("TensorParallelLatentAttention::backward", context);
  const TensorParallelSaved<Saved>* state = nullptr;
  std::optional<HeadsBackward> backward;
  InputGradientOutputs results;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        state = &check_backward<TensorParallelSaved<Saved>>(operation, *this, saved, identity_,
                                                            grad_out, gradients);
        describe(context, signature);
        signature.add("grad_out", grad_out);
        signature.add("key", state->self ? ConstTensorView() : state->key);
      },
      [&](CollectiveCall& call) {
        backward.emplace(context, *this, own_heads(), *state, [&](const TensorView& sum) {
          sum_over_ranks(context, call, sum, 0, call.size());
        });
        backward->run(project_out_backward(context, call, *this,
                                           {.out = plan_->out,
                                            .all_attended = state->all_attended,
                                            .grad_out = grad_out,
                                            .own_shape = state->attended.shape()},
                                           backward->pending()));
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

}  // namespace ladon
