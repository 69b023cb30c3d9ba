// Backward of LatentAttention, through the expanded form.

#include <string>
#include <utility>

#include "core/checks.h"
#include "core/element.h"
#include "core/fail.h"
#include "layers/latent_pass.h"
#include "layers/norm.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::backward";

class BackwardPass {
 public:
  BackwardPass(const Context& context, LatentAttention& layer, const Saved& saved)
      : context_(context),
        layer_(layer),
        options_(layer.options()),
        saved_(saved),
        pass_(context, layer),
        pending_(layer),
        dx_(sums(saved.x.shape())) {}

  InputGradients run(const ConstTensorView& grad_out) {
    const InputRows dout(grad_out);
    Tensor dattended = Tensor::uninitialized(layer_.dtype(), saved_.attended.shape());
    {
      Tensor total = sums(saved_.attended.shape());
      add_input_gradient(context_, dout.view(), pass_.weight("o_proj.weight"), merged(total));
      copy(total, dattended);
    }
    add_weight_gradient(context_, merged(saved_.attended), dout.view(),
                        pending_.of("o_proj.weight"), pending_.of("o_proj.bias"));

    Tensor dqueries = Tensor::uninitialized(layer_.dtype(), saved_.queries.shape());
    Tensor dkeys = Tensor::uninitialized(layer_.dtype(), saved_.keys.shape());
    Tensor dvalues = Tensor::uninitialized(layer_.dtype(), saved_.values.shape());
    attention_backward(context_, saved_.queries, saved_.keys, saved_.values, saved_.options,
                       {.out = saved_.attended, .lse = saved_.lse, .dout = dattended},
                       {.dq = dqueries, .dk = dkeys, .dv = dvalues});
    queries_back(dqueries);
    latents_back(dkeys, dvalues);

    InputGradients gradients;
    gradients.query = saved_.batched ? Tensor::copy_of(dx_, layer_.dtype())
                                     : Tensor::copy_of(dx_.view().select(0, 0), layer_.dtype());
    pending_.commit();
    return gradients;
  }

 private:
  /// Zeros in which gradients are summed.
  Tensor sums(const Dims& shape) const { return Tensor(pass_.compute_dtype(), shape); }

  /// dy of a projection of x: into x's gradient and the weight's.
  void project_back(const ConstTensorView& dy, const std::string& name, const ConstTensorView& x,
                    const TensorView& dx) {
    add_input_gradient(context_, dy, pass_.weight(name + ".weight"), dx);
    add_weight_gradient(context_, x, dy, pending_.of(name + ".weight"),
                        pending_.of(name + ".bias"));
  }

  void queries_back(Tensor& dqueries) {
    if (options_.rope_dim != 0) {
      const TensorView turned = head_columns(merged(dqueries), saved_.x.size(1), options_.num_heads,
                                             options_.nope_dim, layer_.head_dim());
      rope_backward(context_, turned, options_.rope, saved_.query_positions, turned);
    }
    if (!pass_.low_rank()) {
      return project_back(merged(std::as_const(dqueries)), "q_proj", rows_of(saved_.x),
                          rows_of(dx_));
    }
    Tensor dlow = sums(saved_.low.shape());
    project_back(merged(std::as_const(dqueries)), "q_b_proj", rows_of(saved_.normed_low),
                 rows_of(dlow));
    if (options_.query_norm) {
      rms_norm_backward(context_, rows_of(saved_.low), pass_.weight("q_a_layernorm.weight"),
                        options_.norm_epsilon, rows_of(std::as_const(dlow)), rows_of(dlow),
                        pending_.of("q_a_layernorm.weight"));
    }
    project_back(rows_of(std::as_const(dlow)), "q_a_proj", rows_of(saved_.x), rows_of(dx_));
  }

  /// The rope key's gradient is the sum over the heads that share it.
  void sum_rope_keys(const Tensor& dkeys, const TensorView& dlatents) const {
    const ConstTensorView from =
        head_columns(merged(dkeys), 0, options_.num_heads, options_.nope_dim, layer_.head_dim());
    for (std::int64_t row = 0; row < dlatents.size(0); ++row) {
      for (std::int64_t i = 0; i < options_.rope_dim; ++i) {
        double sum = 0;
        for (std::int64_t head = 0; head < options_.num_heads; ++head) {
          sum += load_element(from.data(), from.dtype(),
                              row * from.stride(1) + head * from.stride(2) + i);
        }
        store_element(dlatents.data(), dlatents.dtype(),
                      row * dlatents.stride(0) + options_.kv_rank + i, sum);
      }
    }
  }

  void latents_back(const Tensor& dkeys, const Tensor& dvalues) {
    const std::int64_t rank = options_.kv_rank;
    Tensor dlatents = sums(saved_.latents.shape());
    const TensorView rows = rows_of(dlatents);
    const TensorView dlatent = rows.slice(1, 0, rank);
    const ConstTensorView latent = rows_of(saved_.latents).slice(1, 0, rank);
    const ConstTensorView kv_b = pass_.weight("kv_b_proj.weight");
    const TensorView dkv_b = pending_.of("kv_b_proj.weight");
    for (std::int64_t head = 0; head < options_.num_heads; ++head) {
      const std::int64_t key = head * layer_.head_dim();
      const std::int64_t value = head * options_.value_dim;
      const ConstTensorView dkey = merged(dkeys).slice(1, key, key + options_.nope_dim);
      const ConstTensorView dvalue = merged(dvalues).slice(1, value, value + options_.value_dim);
      add_input_gradient(context_, dkey, pass_.key_rows(kv_b, head), dlatent);
      add_input_gradient(context_, dvalue, pass_.value_rows(kv_b, head), dlatent);
      add_weight_gradient(context_, latent, dkey, pass_.key_rows(dkv_b, head), {});
      add_weight_gradient(context_, latent, dvalue, pass_.value_rows(dkv_b, head), {});
    }
    if (options_.kv_norm) {
      rms_norm_backward(context_, rows_of(saved_.compressed).slice(1, 0, rank),
                        pass_.weight("kv_a_layernorm.weight"), options_.norm_epsilon, dlatent,
                        dlatent, pending_.of("kv_a_layernorm.weight"));
    }
    if (options_.rope_dim != 0) {
      sum_rope_keys(dkeys, rows);
      const TensorView turned = head_columns(rows, saved_.x.size(1), 1, rank, layer_.latent_dim());
      rope_backward(context_, turned, options_.rope, saved_.key_positions, turned);
    }
    project_back(rows, "kv_a_proj_with_mqa", rows_of(saved_.x), rows_of(dx_));
  }

  const Context& context_;
  LatentAttention& layer_;
  const LatentAttentionOptions& options_;
  const Saved& saved_;
  const Pass pass_;
  PendingGradients pending_;
  Tensor dx_;
};

}  // namespace

InputGradients LatentAttention::backward(const Context& context, const ConstTensorView& grad_out,
                                         const SavedForward& saved) {
  const auto& state = static_cast<const Saved&>(check_saved(kOperation, saved, identity_));
  const std::int64_t batch = state.x.size(0);
  const std::int64_t length = state.x.size(1);
  check_tensor(kOperation, {"grad_out", grad_out}, dtype(),
               state.batched ? Dims{batch, length, embed_dim()} : Dims{length, embed_dim()});
  return BackwardPass(context, *this, state).run(with_batch(grad_out));
}

}  // namespace ladon
