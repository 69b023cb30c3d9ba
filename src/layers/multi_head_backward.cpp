// Backward of MultiHeadAttention.

#include "attention/attend.h"
#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/context_impl.h"
#include "layers/multi_head.h"
#include "layers/norm.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::backward";

/// The reverse of giving each query head its KV head's value: sums over the heads of each group.
Tensor sum_groups(const Context& context, const Tensor& dattended, std::int64_t num_kv_heads) {
  const std::int64_t rows = dattended.size(0) * dattended.size(1);
  const std::int64_t dim = dattended.size(3);
  Tensor dv = Tensor::uninitialized(context, dattended.dtype(),
                                    {dattended.size(0), dattended.size(1), num_kv_heads, dim});
  backend_of(context).sum_heads({.rows = rows,
                                 .groups = num_kv_heads,
                                 .group = dattended.size(2) / num_kv_heads,
                                 .dim = dim,
                                 .x = matrix_of(merged(dattended)),
                                 .x_head_stride = dim,
                                 .y = matrix_of(merged(dv)),
                                 .y_head_stride = dim});
  return dv;
}

/// Backward, from the output's gradient to the inputs'.
class Backward {
 public:
  Backward(const Context& context, MultiHeadAttention& layer, const Saved& saved)
      : context_(context),
        layer_(layer),
        plan_(layer.plan()),
        saved_(saved),
        steps_(context, layer),
        pending_(context, layer) {
    dquery_ = sum_for(saved.query);
    if (!saved.self) dkey_ = sum_for(saved.key);
    if (saved.own_value) dvalue_ = sum_for(saved.value);
  }

  InputGradients run(const ConstTensorView& grad_out) {
    const InputRows dout(context_, grad_out);
    Tensor dattended = Tensor::uninitialized(context_, layer_.dtype(), saved_.attended.shape());
    {
      Tensor sums = sum_for(saved_.attended);
      add_input_gradient(context_, dout.view(), steps_.weight(plan_.out.weight), merged(sums));
      copy(context_, sums, dattended);
    }
    add_weight_gradient(context_, merged(saved_.attended), dout.view(),
                        pending_.of(plan_.out.weight), pending_.of(plan_.out.bias));
    if (saved_.one_position) {
      project_back(sum_groups(context_, dattended, layer_.num_kv_heads()), plan_.value,
                   saved_.value_input(), value_sum());
    } else {
      attention_back(dattended);
    }
    InputGradients gradients;
    gradients.query = finished(dquery_);
    if (!saved_.self) gradients.key = finished(dkey_);
    if (saved_.own_value) gradients.value = finished(dvalue_);
    pending_.commit();
    return gradients;
  }

 private:
  DType sum_dtype() const { return compute_dtype(layer_.dtype()); }
  Tensor sum_for(const Tensor& input) const { return Tensor(context_, sum_dtype(), input.shape()); }
  Tensor& key_sum() { return saved_.self ? dquery_ : dkey_; }
  Tensor& value_sum() { return saved_.own_value ? dvalue_ : key_sum(); }

  /// An input's gradient in the layer's dtype, without a batch where the input had none.
  Tensor finished(const Tensor& sum) const {
    if (saved_.batched) return Tensor::copy_of(context_, sum, layer_.dtype());
    return Tensor::copy_of(context_, sum.view().select(0, 0), layer_.dtype());
  }

  void project_back(const Tensor& dy, const LinearIndex& linear, const ConstTensorView& x,
                    Tensor& dx) {
    add_input_gradient(context_, merged(dy), steps_.weight(linear.weight), rows_of(dx));
    add_weight_gradient(context_, InputRows(context_, x).view(), merged(dy),
                        pending_.of(linear.weight), pending_.of(linear.bias));
  }

  /// In place. The norm's input is projected once more, not kept.
  void norm_and_rope_backward(Tensor& dheads, const LinearIndex& linear, int norm,
                              const ConstTensorView& x, const RopePositions& positions) {
    const MultiHeadAttentionOptions& options = layer_.options();
    if (options.rope.has_value()) {
      rope_internal::rotate_in_place(context_, dheads, plan_.rope, positions, /*backward=*/true);
    }
    if (!options.qk_norm) return;
    const Tensor heads = steps_.project_heads(x, linear, dheads.size(2));
    rms_norm_backward(context_, heads, steps_.weight(norm), norm_constants(options), dheads, dheads,
                      pending_.of(norm));
  }

  void attention_back(const Tensor& dattended) {
    AttentionOptions options = saved_.options;
    // The layer's own once more: it may have moved since.
    options.alibi_slopes = layer_.alibi_slopes();
    options.sinks = steps_.weight(plan_.sinks);
    Tensor dq = Tensor::uninitialized(context_, layer_.dtype(), saved_.q.shape());
    Tensor dk = Tensor::uninitialized(context_, layer_.dtype(), saved_.k.shape());
    Tensor dv = Tensor::uninitialized(context_, layer_.dtype(), saved_.v.shape());
    // dsinks is written, not added: what is pending was 0 until now.
    attend_backward(context_, saved_.q, saved_.k, saved_.v, options,
                    {.out = saved_.attended, .lse = saved_.lse, .dout = dattended},
                    {.dq = dq, .dk = dk, .dv = dv, .dsinks = pending_.of(plan_.sinks)});
    norm_and_rope_backward(dq, plan_.query, plan_.query_norm, saved_.query, saved_.query_positions);
    norm_and_rope_backward(dk, plan_.key, plan_.key_norm, saved_.key_input(), saved_.key_positions);
    project_back(dq, plan_.query, saved_.query, dquery_);
    project_back(dk, plan_.key, saved_.key_input(), key_sum());
    project_back(dv, plan_.value, saved_.value_input(), value_sum());
  }

  const Context& context_;
  MultiHeadAttention& layer_;
  const MultiHeadAttention::Plan& plan_;
  const Saved& saved_;
  Steps steps_;
  PendingGradients pending_;
  Tensor dquery_, dkey_, dvalue_;
};

}  // namespace

InputGradients MultiHeadAttention::backward(const Context& context, const ConstTensorView& grad_out,
                                            const SavedForward& saved) {
  const Operation operation(kOperation, context);
  check_device(operation, "layer", device());
  const auto& state = static_cast<const Saved&>(check_saved(operation, *this, saved, identity_));
  check_device(operation, "saved", state.query.device());
  const std::int64_t batch = state.query.size(0);
  const std::int64_t length = state.query.size(1);
  check_tensor(
      operation, {"grad_out", grad_out}, options_.dtype,
      state.batched ? Dims{batch, length, options_.embed_dim} : Dims{length, options_.embed_dim});
  return Backward(context, *this, state).run(with_batch(grad_out));
}

}  // namespace ladon
