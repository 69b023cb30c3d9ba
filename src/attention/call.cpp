#include "attention/call.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "core/context_impl.h"

namespace ladon {
namespace {

/// Views that are only read are kept as void*, because one struct serves inputs and outputs.
void* writable(const void* data) { return const_cast<void*>(data); }

/// The stride of a dimension; 0 where it has one element, whose stride means nothing.
std::int64_t stride_of(const ConstTensorView& view, int dim) {
  return view.size(dim) == 1 ? 0 : view.stride(dim);
}

BroadcastOperand broadcast_operand(const ConstTensorView& view) {
  if (view.absent()) return {};
  return {view.data(),        view.dtype(),       stride_of(view, 0),
          stride_of(view, 1), stride_of(view, 2), stride_of(view, 3)};
}

HeadOperand head_operand(const ConstTensorView& view) {
  if (view.absent()) return {};
  return {writable(view.data()), view.dtype(), stride_of(view, 0)};
}

BiasGradient bias_gradient(const TensorView& view) {
  BiasGradient gradient;
  if (view.absent()) return gradient;
  gradient.data = view.data();
  gradient.dtype = view.dtype();
  for (int dim = 0; dim < 4; ++dim) {
    gradient.sizes[dim] = view.size(dim);
    gradient.strides[dim] = stride_of(view, dim);
  }
  return gradient;
}

ScoreRules score_rules(const AttentionOptions& options, const AttentionSizes& sizes) {
  ScoreRules rules;
  rules.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(sizes.head_dim)));
  rules.softcap = options.softcap;
  rules.alibi_slopes = head_operand(options.alibi_slopes);
  rules.sinks = head_operand(options.sinks);
  rules.bias = broadcast_operand(options.bias);
  rules.mask = broadcast_operand(options.mask);
  rules.window_left = std::min(options.window_left.value_or(kNoWindow), kNoWindow);
  rules.window_right =
      options.causal ? 0 : std::min(options.window_right.value_or(kNoWindow), kNoWindow);
  const double probability = options.dropout.probability;
  rules.dropout = probability > 0;
  rules.dropout_threshold = static_cast<std::uint32_t>(std::min(probability * 0x1p32, 0x1p32 - 1));
  rules.dropout_scale = 1 / (1 - probability);
  rules.dropout_seed = options.dropout.seed;
  rules.dropout_head = options.dropout.first_head;
  rules.dropout_query = options.dropout.first_query;
  rules.dropout_key = options.dropout.first_key;
  return rules;
}

}  // namespace

AttentionCall::AttentionCall(const Context& context, const AttentionSizes& sizes,
                             const AttentionOptions& options)
    : sizes_(sizes),
      list_(context.impl().host_scratch(), sizes.num_sequences),
      query_offsets_(options.query_offsets),
      kv_offsets_(options.kv_offsets) {
  params_.num_sequences = sizes.num_sequences;
  params_.num_heads = sizes.num_heads;
  params_.num_kv_heads = sizes.num_kv_heads;
  params_.group = sizes.num_heads / sizes.num_kv_heads;
  params_.head_dim = sizes.head_dim;
  params_.value_dim = sizes.value_dim;
  params_.max_query_len = sizes.max_query_len;
  params_.max_kv_len = sizes.max_kv_len;
  params_.padded_kv_len = sizes.packed ? 0 : sizes.kv_len;
  params_.sequences = list_->sequences;
  params_.rules = score_rules(options, sizes);
  for (std::int64_t s = 0; s < sizes.num_sequences; ++s) {
    Sequence& sequence = *new (list_->sequences + s) Sequence;
    const auto i = static_cast<std::size_t>(s);
    sequence.index = s;
    sequence.dropout_index = options.dropout.first_sequence + s;
    sequence.query_len = sizes.packed ? query_offsets_[i + 1] - query_offsets_[i] : sizes.query_len;
    sequence.kv_len = !kv_offsets_.empty()         ? kv_offsets_[i + 1] - kv_offsets_[i]
                      : options.kv_lengths.empty() ? sizes.kv_len
                                                   : options.kv_lengths[i];
    sequence.position_offset = options.position_offset.value_or(
        options.alignment == Alignment::kBottomRight ? sequence.kv_len - sequence.query_len : 0);
  }
}

AttentionCall::AttentionCall(const Context& context, const AttentionSizes& sizes,
                             const ConstTensorView& q, const ConstTensorView& k,
                             const ConstTensorView& v, const AttentionOptions& options)
    : AttentionCall(context, sizes, options) {
  set_operand(q, query_offsets_, &AttentionParams::q, &Sequence::q);
  set_operand(k, kv_offsets_, &AttentionParams::k, &Sequence::k);
  set_operand(v, kv_offsets_, &AttentionParams::v, &Sequence::v);
}

AttentionCall::AttentionCall(const Context& context, const AttentionSizes& sizes,
                             const ConstTensorView& q, const KvCacheView& cache,
                             const AttentionOptions& options)
    : AttentionCall(context, sizes, options) {
  set_operand(q, query_offsets_, &AttentionParams::q, &Sequence::q);
  const DType stored = cache.format.dtype;
  // As in stride_of().
  const auto slots = [&](std::int64_t stride) { return cache.num_slots == 1 ? 0 : stride; };
  const auto heads = [&](std::int64_t stride) { return cache.num_kv_heads == 1 ? 0 : stride; };
  params_.k = {writable(cache.k), stored, slots(cache.k_slot_stride), heads(cache.k_head_stride)};
  params_.v = {writable(cache.v), stored, slots(cache.v_slot_stride), heads(cache.v_head_stride)};
  params_.kv_layout = {.page_size = cache.page_size,
                       .ring_slots = cache.ring_slots,
                       .k_scales = cache.k_scales,
                       .v_scales = cache.v_scales,
                       .scale_slot_stride = slots(cache.scale_slot_stride),
                       .scale_head_stride = heads(cache.scale_head_stride)};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    Sequence& sequence = list_->sequences[s];
    const KvSequenceView& view = cache.sequences[static_cast<std::size_t>(s)];
    sequence.kv_len = view.length;
    sequence.position_offset = options.position_offset.value_or(view.length - sequence.query_len);
    sequence.pages = view.pages;
    sequence.first_slot = view.first_slot;
    sequence.ring_start = view.ring_start;
    sequence.key_origin = view.key_origin;
  }
}

void AttentionCall::set_operand(const ConstTensorView& view, std::span<const std::int64_t> offsets,
                                Operand AttentionParams::*operand, std::int64_t Sequence::*start) {
  if (view.absent()) return;
  params_.*operand = {writable(view.data()), view.dtype(), stride_of(view, 1), stride_of(view, 2)};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    list_->sequences[s].*start = sizes_.packed
                                     ? offsets[static_cast<std::size_t>(s)] * stride_of(view, 1)
                                     : s * stride_of(view, 0);
  }
}

void AttentionCall::set_lse_operand(const ConstTensorView& view,
                                    LseOperand AttentionParams::*operand,
                                    std::int64_t Sequence::*start) {
  if (view.absent()) return;
  params_.*operand = {writable(view.data()), view.dtype() == DType::kF64, stride_of(view, 2),
                      stride_of(view, 1)};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    list_->sequences[s].*start =
        sizes_.packed ? query_offsets_[static_cast<std::size_t>(s)] * stride_of(view, 2)
                      : s * stride_of(view, 0);
  }
}

void AttentionCall::set_out(const ConstTensorView& out) {
  set_operand(out, query_offsets_, &AttentionParams::out, &Sequence::out);
}

void AttentionCall::set_lse(const ConstTensorView& lse) {
  set_lse_operand(lse, &AttentionParams::lse, &Sequence::lse);
}

void AttentionCall::set_saved(const AttentionSaved& saved) {
  set_out(saved.out);
  set_lse(saved.lse);
  set_operand(saved.dout, query_offsets_, &AttentionParams::dout, &Sequence::dout);
  set_lse_operand(saved.dlse, &AttentionParams::dlse, &Sequence::dlse);
}

void AttentionCall::set_gradients(const AttentionGradients& gradients) {
  set_operand(gradients.dq, query_offsets_, &AttentionParams::dq, &Sequence::dq);
  set_operand(gradients.dk, kv_offsets_, &AttentionParams::dk, &Sequence::dk);
  set_operand(gradients.dv, kv_offsets_, &AttentionParams::dv, &Sequence::dv);
  params_.dbias = bias_gradient(gradients.dbias);
  params_.dsinks = head_operand(gradients.dsinks);
}

}  // namespace ladon
