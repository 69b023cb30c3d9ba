// Backward of LatentAttention, through the expanded form.

#include <utility>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "layers/latent_steps.h"
#include "layers/norm.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::backward";

class Backward {
 public:
  Backward(const Context& context, LatentAttention& layer, const Saved& saved)
      : context_(context),
        layer_(layer),
        options_(layer.options()),
        plan_(layer.plan()),
        saved_(saved),
        steps_(context, layer),
        pending_(context, layer),
        dx_(sums(saved.x.shape())) {
    if (!saved.self) dkey_ = sums(saved.key.shape());
  }

  InputGradients run(const ConstTensorView& grad_out) {
    const InputRows dout(context_, grad_out);
    Tensor dattended = Tensor::uninitialized(context_, layer_.dtype(), saved_.attended.shape());
    {
      Tensor total = sums(saved_.attended.shape());
      add_input_gradient(context_, dout.view(), steps_.weight(plan_.out.weight), merged(total));
      copy(context_, total, dattended);
    }
    add_weight_gradient(context_, merged(saved_.attended), dout.view(),
                        pending_.of(plan_.out.weight), pending_.of(plan_.out.bias));

    Tensor dqueries = Tensor::uninitialized(context_, layer_.dtype(), saved_.queries.shape());
    Tensor dkeys = Tensor::uninitialized(context_, layer_.dtype(), saved_.keys.shape());
    Tensor dvalues = Tensor::uninitialized(context_, layer_.dtype(), saved_.values.shape());
    attend_backward(context_, saved_.queries, saved_.keys, saved_.values, saved_.options,
                    {.out = saved_.attended, .lse = saved_.lse, .dout = dattended},
                    {.dq = dqueries, .dk = dkeys, .dv = dvalues});
    queries_back(dqueries);
    latents_back(dkeys, dvalues);

    InputGradients gradients;
    gradients.query = finished(dx_);
    if (!saved_.self) gradients.key = finished(dkey_);
    pending_.commit();
    return gradients;
  }

 private:
  /// Zeros in which gradients are summed.
  Tensor sums(const Dims& shape) const { return Tensor(context_, steps_.compute_dtype(), shape); }

  /// An input's gradient in the layer's dtype, without a batch where the input had none.
  Tensor finished(const Tensor& sum) const {
    if (saved_.batched) return Tensor::copy_of(context_, sum, layer_.dtype());
    return Tensor::copy_of(context_, sum.view().select(0, 0), layer_.dtype());
  }

  /// dy of a projection of x: into x's gradient and the weight's.
  void project_back(const ConstTensorView& dy, const LinearIndex& linear, const ConstTensorView& x,
                    const TensorView& dx) {
    add_input_gradient(context_, dy, steps_.weight(linear.weight), dx);
    add_weight_gradient(context_, x, dy, pending_.of(linear.weight), pending_.of(linear.bias));
  }

  void queries_back(Tensor& dqueries) {
    steps_.rotate_queries(merged(dqueries), saved_.x.size(1), saved_.query_positions,
                          /*backward=*/true);
    if (!steps_.low_rank()) {
      return project_back(merged(std::as_const(dqueries)), plan_.query, rows_of(saved_.x),
                          rows_of(dx_));
    }
    Tensor dlow = sums(saved_.low.shape());
    project_back(merged(std::as_const(dqueries)), plan_.query, rows_of(saved_.normed_low),
                 rows_of(dlow));
    if (options_.query_norm) {
      rms_norm_backward(context_, rows_of(saved_.low), steps_.weight(plan_.query_norm),
                        options_.norm_epsilon, rows_of(std::as_const(dlow)), rows_of(dlow),
                        pending_.of(plan_.query_norm));
    }
    project_back(rows_of(std::as_const(dlow)), plan_.query_low, rows_of(saved_.x), rows_of(dx_));
  }

  /// The rope key's gradient is the sum over the heads that share it.
  void sum_rope_keys(const Tensor& dkeys, const TensorView& dlatents) const {
    const ConstTensorView from = merged(dkeys).slice(1, options_.nope_dim, layer_.head_dim());
    const TensorView to = dlatents.slice(1, options_.kv_rank, layer_.latent_dim());
    backend_of(context_).sum_heads({.rows = from.size(0),
                                    .group = options_.num_heads,
                                    .dim = options_.rope_dim,
                                    .x = matrix_of(from),
                                    .x_head_stride = layer_.head_dim(),
                                    .y = matrix_of(to)});
  }

  void latents_back(const Tensor& dkeys, const Tensor& dvalues) {
    const std::int64_t rank = options_.kv_rank;
    Tensor dlatents = sums(saved_.latents.shape());
    const TensorView rows = rows_of(dlatents);
    const TensorView dlatent = rows.slice(1, 0, rank);
    const ConstTensorView latent = rows_of(saved_.latents).slice(1, 0, rank);
    const ConstTensorView kv_b = steps_.weight(plan_.kv_b);
    const TensorView dkv_b = pending_.of(plan_.kv_b);
    for (std::int64_t head = 0; head < options_.num_heads; ++head) {
      const std::int64_t key = head * layer_.head_dim();
      const std::int64_t value = head * options_.value_dim;
      const ConstTensorView dvalue = merged(dvalues).slice(1, value, value + options_.value_dim);
      if (options_.nope_dim != 0) {
        const ConstTensorView dkey = merged(dkeys).slice(1, key, key + options_.nope_dim);
        add_input_gradient(context_, dkey, steps_.key_rows(kv_b, head), dlatent);
        add_weight_gradient(context_, latent, dkey, steps_.key_rows(dkv_b, head), {});
      }
      add_input_gradient(context_, dvalue, steps_.value_rows(kv_b, head), dlatent);
      add_weight_gradient(context_, latent, dvalue, steps_.value_rows(dkv_b, head), {});
    }
    if (options_.kv_norm) {
      rms_norm_backward(context_, rows_of(saved_.compressed).slice(1, 0, rank),
                        steps_.weight(plan_.latent_norm), options_.norm_epsilon, dlatent, dlatent,
                        pending_.of(plan_.latent_norm));
    }
    if (options_.rope_dim != 0) {
      sum_rope_keys(dkeys, rows);
      steps_.rotate_latents(rows, saved_.latents.size(1), saved_.key_positions, /*backward=*/true);
    }
    project_back(rows, plan_.latents, rows_of(saved_.key_input()),
                 rows_of(saved_.self ? dx_ : dkey_));
  }

  const Context& context_;
  LatentAttention& layer_;
  const LatentAttentionOptions& options_;
  const LatentAttention::Plan& plan_;
  const Saved& saved_;
  const Steps steps_;
  PendingGradients pending_;
  Tensor dx_, dkey_;
};

}  // namespace

InputGradients LatentAttention::backward(const Context& context, const ConstTensorView& grad_out,
                                         const SavedForward& saved) {
  const Operation operation(kOperation, context);
  check_device(operation, "layer", device());
  const auto& state = static_cast<const Saved&>(check_saved(operation, *this, saved, identity_));
  check_device(operation, "saved", state.x.device());
  const std::int64_t batch = state.x.size(0);
  const std::int64_t length = state.x.size(1);
  check_tensor(operation, {"grad_out", grad_out}, dtype(),
               state.batched ? Dims{batch, length, embed_dim()} : Dims{length, embed_dim()});
  return Backward(context, *this, state).run(with_batch(grad_out));
}

}  // namespace ladon
