// Backward of MultiHeadAttention.

#include "layers/multi_head_backward.h"

#include "attention/attend.h"
#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/context_impl.h"
#include "layers/norm.h"
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

}  // namespace

HeadsBackward::HeadsBackward(const Context& context, AttentionLayer& layer, const LayerHeads& heads,
                             const Saved& saved)
    : context_(context),
      heads_(heads),
      saved_(saved),
      steps_(context, heads),
      pending_(context, layer) {
  sums_.query = sum_for(saved.query);
  if (!saved.self) sums_.key = sum_for(saved.key);
  if (saved.own_value) sums_.value = sum_for(saved.value);
}

Tensor HeadsBackward::sum_for(const Tensor& input) const {
  return Tensor(context_, compute_dtype(heads_.options.dtype), input.shape());
}

InputGradients HeadsBackward::finished() const {
  const auto finish = [&](const Tensor& sum) {
    if (sum.rank() == 0) return Tensor();
    const DType dtype = heads_.options.dtype;
    if (saved_.batched) return Tensor::copy_of(context_, sum, dtype);
    return Tensor::copy_of(context_, sum.view().select(0, 0), dtype);
  };
  return {finish(sums_.query), finish(sums_.key), finish(sums_.value)};
}

void HeadsBackward::run(const Tensor& dattended) {
  if (!saved_.one_position) return attention_back(dattended);
  project_back(sum_groups(context_, dattended, heads_.options.num_kv_heads), heads_.plan.value,
               saved_.value_input(), value_sum());
}

void HeadsBackward::project_back(const Tensor& dy, const LinearIndex& linear,
                                 const ConstTensorView& x, Tensor& dx) {
  add_input_gradient(context_, merged(dy), steps_.weight(linear.weight), rows_of(dx));
  add_weight_gradient(context_, InputRows(context_, x).view(), merged(dy),
                      pending_.of(linear.weight), pending_.of(linear.bias));
}

/// In place. The norm's input is projected once more, not kept.
void HeadsBackward::norm_and_rope_backward(Tensor& dheads, const LinearIndex& linear, int norm,
                                           const ConstTensorView& x,
                                           const RopePositions& positions) {
  const MultiHeadAttentionOptions& options = heads_.options;
  if (options.rope.has_value()) {
    rope_internal::rotate_in_place(context_, dheads, heads_.plan.rope, positions,
                                   /*backward=*/true);
  }
  if (!options.qk_norm) return;
  const Tensor heads = steps_.project_heads(x, linear, dheads.size(2));
  rms_norm_backward(context_, heads, steps_.weight(norm), norm_constants(options), dheads, dheads,
                    pending_.of(norm));
}

void HeadsBackward::attention_back(const Tensor& dattended) {
  const MultiHeadAttention::Plan& plan = heads_.plan;
  const DType dtype = heads_.options.dtype;
  AttentionOptions options = saved_.options;
  // The layer's own once more: it may have moved since.
  options.alibi_slopes = heads_.alibi_slopes;
  options.sinks = steps_.weight(plan.sinks);
  Tensor dq = Tensor::uninitialized(context_, dtype, saved_.q.shape());
  Tensor dk = Tensor::uninitialized(context_, dtype, saved_.k.shape());
  Tensor dv = Tensor::uninitialized(context_, dtype, saved_.v.shape());
  // dsinks is written, not added: what is pending was 0 until now.
  attend_backward(context_, saved_.q, saved_.k, saved_.v, options,
                  {.out = saved_.attended, .lse = saved_.lse, .dout = dattended},
                  {.dq = dq, .dk = dk, .dv = dv, .dsinks = pending_.of(plan.sinks)});
  norm_and_rope_backward(dq, plan.query, plan.query_norm, saved_.query, saved_.query_positions);
  norm_and_rope_backward(dk, plan.key, plan.key_norm, saved_.key_input(), saved_.key_positions);
  project_back(dq, plan.query, saved_.query, sums_.query);
  project_back(dk, plan.key, saved_.key_input(), key_sum());
  project_back(dv, plan.value, saved_.value_input(), value_sum());
}

namespace {

/// Backward, from the output's gradient to the inputs'.
InputGradients run_backward(const Context& context, MultiHeadAttention& layer, const Saved& saved,
                            const ConstTensorView& grad_out) {
  const LinearIndex& out = layer.plan().out;
  HeadsBackward heads(context, layer, layer, saved);
  const InputRows dout(context, grad_out);
  Tensor dattended = Tensor::uninitialized(context, layer.dtype(), saved.attended.shape());
  {
    Tensor sums(context, compute_dtype(layer.dtype()), saved.attended.shape());
    add_input_gradient(context, dout.view(), weight_of(layer, out.weight), merged(sums));
    copy(context, sums, dattended);
  }
  add_weight_gradient(context, merged(saved.attended), dout.view(), heads.pending().of(out.weight),
                      heads.pending().of(out.bias));
  heads.run(dattended);
  InputGradients gradients = heads.finished();
  heads.pending().commit();
  return gradients;
}

}  // namespace

InputGradients MultiHeadAttention::backward(const Context& context, const ConstTensorView& grad_out,
                                            const SavedForward& saved) {
  const Operation operation(kOperation, context);
  const auto& state =
      check_backward<Saved>(operation, *this, saved, identity_, &Saved::query, grad_out);
  return run_backward(context, *this, state, with_batch(grad_out));
}

}  // namespace ladon
