// Backward of LatentAttention, through the expanded form.

#include "layers/latent_backward.h"

#include <utility>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "layers/norm.h"
#include "layers/projection.h"

namespace ladon {
namespace latent {

HeadsBackward::HeadsBackward(const Context& context, AttentionLayer& layer,
                             const LatentHeads& heads, const Saved& saved,
                             AddOtherHeads add_other_heads)
    : context_(context),
      heads_(heads),
      options_(heads.options),
      plan_(heads.plan),
      saved_(saved),
      steps_(context, heads),
      add_other_heads_(std::move(add_other_heads)),
      pending_(context, layer),
      dx_(sums(saved.x.shape())) {
  if (!saved.self) dkey_ = sums(saved.key.shape());
}

void HeadsBackward::run(const Tensor& dattended) {
  Tensor dqueries = Tensor::uninitialized(context_, heads_.dtype(), saved_.queries.shape());
  Tensor dkeys = Tensor::uninitialized(context_, heads_.dtype(), saved_.keys.shape());
  Tensor dvalues = Tensor::uninitialized(context_, heads_.dtype(), saved_.values.shape());
  attend_backward(context_, saved_.queries, saved_.keys, saved_.values, saved_.options,
                  {.out = saved_.attended, .lse = saved_.lse, .dout = dattended},
                  {.dq = dqueries, .dk = dkeys, .dv = dvalues});
  queries_back(dqueries);
  Tensor dlatents = sums(saved_.latents.shape());
  const TensorView rows = rows_of(dlatents);
  expansion_back(rows_of(saved_.latents), 0, dkeys, dvalues, rows);
  if (options_.rope_dim != 0) {
    sum_rope_keys(dkeys, rows.slice(1, options_.kv_rank, heads_.latent_dim()));
  }
  add_other_heads_(dlatents);
  latents_back(dlatents);
}

Tensor HeadsBackward::out_back(const ConstTensorView& grad_out) {
  const InputRows dout(context_, with_batch(grad_out));
  Tensor dattended = Tensor::uninitialized(context_, heads_.dtype(), saved_.attended.shape());
  const GradientTerm term{dout.view(), steps_.weight(plan_.out.weight)};
  sum_input_gradients(context_, {&term, 1}, merged(dattended));
  add_weight_gradient(context_, merged(saved_.attended), dout.view(), pending_.of(plan_.out.weight),
                      pending_.of(plan_.out.bias));
  return dattended;
}

void HeadsBackward::finish(InputGradientOutputs& gradients) const {
  const auto open = [&](LayerOutput& output, const ConstTensorView& sum) {
    if (!output.wanted()) return TensorView();
    return output.open(context_, heads_.dtype(), saved_.given_shape(sum));
  };
  const auto write = [&](const ConstTensorView& sum, const TensorView& to) {
    if (!to.absent()) copy(context_, saved_.batched ? sum : sum.select(0, 0), to);
  };
  const TensorView query = open(gradients.query, dx_);
  const TensorView key = open(gradients.key, dkey_);
  write(dx_, query);
  write(dkey_, key);
}

/// dy of a projection of x: into x's gradient and the weight's.
void HeadsBackward::project_back(const ConstTensorView& dy, const LinearIndex& linear,
                                 const ConstTensorView& x, const TensorView& dx) {
  add_input_gradient(context_, dy, steps_.weight(linear.weight), dx);
  add_weight_gradient(context_, x, dy, pending_.of(linear.weight), pending_.of(linear.bias));
}

void HeadsBackward::queries_back(Tensor& dqueries) {
  steps_.rotate_queries(merged(dqueries), saved_.x.size(1), saved_.query_positions,
                        /*backward=*/true);
  if (!steps_.low_rank()) {
    project_back(merged(std::as_const(dqueries)), plan_.query, rows_of(saved_.x), rows_of(dx_));
    return add_other_heads_(dx_);
  }
  Tensor dlow = sums(saved_.low.shape());
  project_back(merged(std::as_const(dqueries)), plan_.query, rows_of(saved_.normed_low),
               rows_of(dlow));
  add_other_heads_(dlow);
  if (options_.query_norm) {
    rms_norm_backward(context_, rows_of(saved_.low), steps_.weight(plan_.query_norm),
                      options_.norm_epsilon, rows_of(std::as_const(dlow)), rows_of(dlow),
                      pending_.of(plan_.query_norm));
  }
  project_back(rows_of(std::as_const(dlow)), plan_.query_low, rows_of(saved_.x), rows_of(dx_));
}

void HeadsBackward::sum_rope_keys(const Tensor& dkeys, const TensorView& drope_key) const {
  const ConstTensorView from = merged(dkeys).slice(1, options_.nope_dim, heads_.head_dim());
  backend_of(context_).sum_heads({.rows = from.size(0),
                                  .group = dkeys.size(2),
                                  .dim = options_.rope_dim,
                                  .x = matrix_of(from),
                                  .x_head_stride = heads_.head_dim(),
                                  .y = matrix_of(drope_key)});
}

void HeadsBackward::expansion_back(const ConstTensorView& latents, std::int64_t first_head,
                                   const Tensor& dkeys, const Tensor& dvalues,
                                   const TensorView& dlatents) {
  const TensorView dlatent = dlatents.slice(1, 0, options_.kv_rank);
  const ConstTensorView latent = latents.slice(1, 0, options_.kv_rank);
  const ConstTensorView kv_b = steps_.weight(plan_.kv_b);
  const TensorView dkv_b = pending_.of(plan_.kv_b);
  for (std::int64_t i = 0; i < dkeys.size(2); ++i) {
    const std::int64_t head = first_head + i;
    const std::int64_t key = i * heads_.head_dim();
    const std::int64_t value = i * options_.value_dim;
    const ConstTensorView dvalue = merged(dvalues).slice(1, value, value + options_.value_dim);
    if (options_.nope_dim != 0) {
      const ConstTensorView dkey = merged(dkeys).slice(1, key, key + options_.nope_dim);
      add_input_gradient(context_, dkey, steps_.key_rows(kv_b, head), dlatent);
      add_weight_gradient(context_, latent, dkey, steps_.key_rows(dkv_b, head), {});
    }
    add_input_gradient(context_, dvalue, steps_.value_rows(kv_b, head), dlatent);
    add_weight_gradient(context_, latent, dvalue, steps_.value_rows(dkv_b, head), {});
  }
}

void HeadsBackward::latents_back(Tensor& dlatents) {
  const TensorView rows = rows_of(dlatents);
  if (options_.kv_norm) {
    const TensorView dlatent = rows.slice(1, 0, options_.kv_rank);
    rms_norm_backward(context_, rows_of(saved_.compressed).slice(1, 0, options_.kv_rank),
                      steps_.weight(plan_.latent_norm), options_.norm_epsilon, dlatent, dlatent,
                      pending_.of(plan_.latent_norm));
  }
  if (options_.rope_dim != 0) {
    steps_.rotate_latents(rows, saved_.latents.size(1), saved_.key_positions, /*backward=*/true);
  }
  project_back(rows, plan_.latents, rows_of(saved_.key_input()),
               rows_of(saved_.self ? dx_ : dkey_));
}

}  // namespace latent

void LatentAttention::run_backward(const Context& context, const ConstTensorView& grad_out,
                                   const SavedForward& saved, InputGradientOutputs& gradients) {
  const Operation operation("LatentAttention::backward", context);
  const auto& state =
      check_backward<latent::Saved>(operation, *this, saved, identity_, grad_out, gradients);
  if (state.keys.rank() == 0) {
    fail(operation, "saved",
         "got what context_parallel_forward_training() saved, expected forward_training()");
  }
  latent::HeadsBackward backward(context, *this, *this, state, [](const TensorView&) {});
  backward.run(backward.out_back(grad_out));
  backward.finish(gradients);
  backward.pending().commit();
}

}  // namespace ladon
