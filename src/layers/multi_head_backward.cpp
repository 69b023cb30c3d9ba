// Backward of MultiHeadAttention.

#include "layers/multi_head_backward.h"

#include <array>
#include <cstddef>
#include <utility>
#include <vector>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "layers/norm.h"

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
                             const Saved& saved, DType dtype, InputGradientOutputs& gradients)
    : context_(context),
      heads_(heads),
      saved_(saved),
      steps_(context, heads),
      pending_(context, layer),
      dtype_(dtype),
      gradients_(gradients) {}

void HeadsBackward::run(const Tensor& dattended) {
  saved_.one_position ? one_position_back(dattended) : attention_back(dattended);
}

void HeadsBackward::one_position_back(const Tensor& dattended) {
  const LinearIndex& value = heads_.plan.value;
  const Tensor dv = sum_groups(context_, dattended, heads_.options.num_kv_heads);
  const InputRows value_rows(context_, saved_.value_input());
  const WeightGradient of_value = weight_gradient(dv, value, value_rows);
  add_weight_gradients(context_, {&of_value, 1});
  const GradientTerm only = term(dv, value);
  const InputGradient query{gradients_.query, saved_.query, {&only, 1}};
  write_input_gradients({&query, 1});
}

GradientTerm HeadsBackward::term(const Tensor& dy, const LinearIndex& linear) const {
  return {merged(dy), steps_.weight(linear.weight)};
}

void HeadsBackward::write_input_gradients(std::span<const InputGradient> gradients) const {
  std::vector<std::pair<const InputGradient*, OutputRows>> writes;  // memory for all of them first
  for (const InputGradient& gradient : gradients) {
    if (!gradient.output.wanted()) continue;
    const Dims shape = saved_.given_shape(gradient.input);
    writes.emplace_back(&gradient,
                        OutputRows(context_, gradient.output.open(context_, dtype_, shape)));
  }
  for (const auto& [gradient, rows] : writes) {
    sum_input_gradients(context_, gradient->terms, rows.view());
    rows.finish(context_);
  }
}

WeightGradient HeadsBackward::weight_gradient(const Tensor& dy, const LinearIndex& linear,
                                              const InputRows& x) {
  return {x.view(), merged(dy), pending_.of(linear.weight), pending_.of(linear.bias)};
}

/// In place. The norm's input is projected once more, not kept.
void HeadsBackward::norm_backward(Tensor& dheads, const LinearIndex& linear, int norm,
                                  const ConstTensorView& x) {
  const Tensor heads = steps_.project_heads(x, linear, dheads.size(2));
  rms_norm_backward(context_, heads, steps_.weight(norm), norm_constants(heads_.options), dheads,
                    dheads, pending_.of(norm));
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
  if (heads_.options.rope.has_value()) {
    rope_internal::rotate_in_place(context_, {dq, saved_.query_positions},
                                   {dk, saved_.key_positions}, plan.rope, /*backward=*/true);
  }
  if (heads_.options.qk_norm) {
    norm_backward(dq, plan.query, plan.query_norm, saved_.query);
    norm_backward(dk, plan.key, plan.key_norm, saved_.key_input());
  }
  const InputRows query_rows(context_, saved_.query);
  const InputRows key_rows(context_, saved_.key_input());
  const InputRows value_rows(context_, saved_.value_input());
  add_weight_gradients(context_,
                       std::array<WeightGradient, 3>{weight_gradient(dq, plan.query, query_rows),
                                                     weight_gradient(dk, plan.key, key_rows),
                                                     weight_gradient(dv, plan.value, value_rows)});

  const std::array<GradientTerm, 3> terms{term(dq, plan.query), term(dk, plan.key),
                                          term(dv, plan.value)};
  const std::span<const GradientTerm> all(terms);
  const std::size_t of_query = saved_.self ? 3 : 1;
  const std::size_t of_key = saved_.own_value ? 1 : 2;
  const std::array<InputGradient, 3> inputs{{{gradients_.query, saved_.query, all.first(of_query)},
                                             {gradients_.key, saved_.key, all.subspan(1, of_key)},
                                             {gradients_.value, saved_.value, all.last(1)}}};
  write_input_gradients(inputs);
}

void MultiHeadAttention::run_backward(const Context& context, const ConstTensorView& grad_out,
                                      const SavedForward& saved, InputGradientOutputs& gradients) {
  const auto& state = check_backward<Saved>(Operation(kOperation, context), *this, saved, identity_,
                                            grad_out, gradients);
  const LinearIndex& out = plan_->out;
  HeadsBackward heads(context, *this, *this, state, dtype(), gradients);
  const InputRows dout(context, with_batch(grad_out));
  Tensor dattended = Tensor::uninitialized(context, dtype(), state.attended.shape());
  const GradientTerm term{dout.view(), weight_of(*this, out.weight)};
  sum_input_gradients(context, {&term, 1}, merged(dattended));
  add_weight_gradient(context, merged(state.attended), dout.view(), heads.pending().of(out.weight),
                      heads.pending().of(out.bias));
  heads.run(dattended);
  heads.pending().commit();
}

}  // namespace ladon
