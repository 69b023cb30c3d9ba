#include "attention/problem.h"

#include <algorithm>
#include <cmath>
#include <new>

#include "core/context_impl.h"
#include "core/element.h"
#include "core/integer.h"

namespace ladon {
namespace {

std::size_t array_bytes(const AttentionSizes& sizes) {
  return saturating_product(static_cast<std::size_t>(sizes.num_sequences), sizeof(Sequence)) +
         saturating_product(static_cast<std::size_t>(sizes.num_heads), 2 * sizeof(double));
}

/// Views that are only read are kept as void*, because one struct serves inputs and outputs.
void* writable(const void* data) { return const_cast<void*>(data); }

BroadcastOperand broadcast_operand(const ConstTensorView& view) {
  if (view.absent()) return {};
  const auto stride = [&](int dim) { return view.size(dim) == 1 ? 0 : view.stride(dim); };
  return {view.data(), view.dtype(), stride(0), stride(1), stride(2), stride(3)};
}

const double* per_head(const ConstTensorView& view, std::int64_t num_heads, double* to) {
  if (view.absent()) return nullptr;
  for (std::int64_t head = 0; head < num_heads; ++head) {
    to[head] = load_element(view.data(), view.dtype(), head * view.stride(0));
  }
  return to;
}

ScoreRules score_rules(const AttentionOptions& options, const AttentionSizes& sizes,
                       double* per_head_values) {
  ScoreRules rules;
  rules.scale = options.scale.value_or(1 / std::sqrt(static_cast<double>(sizes.head_dim)));
  rules.softcap = options.softcap;
  rules.alibi_slopes = per_head(options.alibi_slopes, sizes.num_heads, per_head_values);
  rules.sinks = per_head(options.sinks, sizes.num_heads, per_head_values + sizes.num_heads);
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
  return rules;
}

}  // namespace

Problem::Problem(const Context& context, std::string_view operation, const ConstTensorView& q,
                 const ConstTensorView& k, const ConstTensorView& v,
                 const AttentionOptions& options)
    : sizes_(check_inputs(operation, q, k, v, options)),
      arrays_(context.impl().workspaces(), array_bytes(sizes_)),
      sequences_(reinterpret_cast<Sequence*>(arrays_.data())),
      query_offsets_(options.query_offsets),
      kv_offsets_(options.kv_offsets) {
  set_up(options);
  set_operand(q, query_offsets_, &AttentionParams::q, &Sequence::q);
  set_operand(k, kv_offsets_, &AttentionParams::k, &Sequence::k);
  if (!v.absent()) set_operand(v, kv_offsets_, &AttentionParams::v, &Sequence::v);
}

Problem::Problem(const Context& context, std::string_view operation, const ConstTensorView& q,
                 const KvCacheView& cache, const AttentionOptions& options)
    : sizes_(check_cache_inputs(operation, q, cache, options)),
      arrays_(context.impl().workspaces(), array_bytes(sizes_)),
      sequences_(reinterpret_cast<Sequence*>(arrays_.data())),
      query_offsets_(options.query_offsets) {
  set_up(options);
  set_operand(q, query_offsets_, &AttentionParams::q, &Sequence::q);
  params_.k = {writable(cache.k), cache.dtype, cache.k_slot_stride, cache.k_head_stride};
  params_.v = {writable(cache.v), cache.dtype, cache.v_slot_stride, cache.v_head_stride};
  params_.kv_layout = {.page_size = cache.page_size,
                       .ring_slots = cache.ring_slots,
                       .k_scales = cache.k_scales,
                       .v_scales = cache.v_scales,
                       .scale_slot_stride = cache.scale_slot_stride,
                       .scale_head_stride = cache.scale_head_stride};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    Sequence& sequence = sequences_[s];
    const KvSequenceView& view = cache.sequences[static_cast<std::size_t>(s)];
    sequence.kv_len = view.length;
    sequence.position_offset = view.length - sequence.query_len;
    sequence.pages = view.pages;
    sequence.first_slot = view.first_slot;
    sequence.ring_start = view.ring_start;
  }
}

void Problem::set_up(const AttentionOptions& options) {
  auto* per_head_values = reinterpret_cast<double*>(sequences_ + sizes_.num_sequences);
  params_.num_sequences = sizes_.num_sequences;
  params_.num_heads = sizes_.num_heads;
  params_.num_kv_heads = sizes_.num_kv_heads;
  params_.group = sizes_.num_heads / sizes_.num_kv_heads;
  params_.head_dim = sizes_.head_dim;
  params_.value_dim = sizes_.value_dim;
  params_.sequences = sequences_;
  params_.rules = score_rules(options, sizes_, per_head_values);
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    Sequence& sequence = *new (sequences_ + s) Sequence;
    const auto i = static_cast<std::size_t>(s);
    sequence.index = s;
    sequence.dropout_index = options.dropout.first_sequence + s;
    sequence.query_len =
        sizes_.packed ? query_offsets_[i + 1] - query_offsets_[i] : sizes_.query_len;
    sequence.kv_len = !kv_offsets_.empty()         ? kv_offsets_[i + 1] - kv_offsets_[i]
                      : options.kv_lengths.empty() ? sizes_.kv_len
                                                   : options.kv_lengths[i];
    sequence.position_offset =
        options.alignment == Alignment::kBottomRight ? sequence.kv_len - sequence.query_len : 0;
  }
}

void Problem::set_operand(const ConstTensorView& view, std::span<const std::int64_t> offsets,
                          Operand AttentionParams::*operand, std::int64_t Sequence::*start) {
  params_.*operand = {writable(view.data()), view.dtype(), view.stride(1), view.stride(2)};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    sequences_[s].*start =
        sizes_.packed ? offsets[static_cast<std::size_t>(s)] * view.stride(1) : s * view.stride(0);
  }
}

void Problem::set_lse_operand(const ConstTensorView& view, LseOperand AttentionParams::*operand,
                              std::int64_t Sequence::*start) {
  params_.*operand = {writable(view.data()), view.dtype() == DType::kF64, view.stride(2),
                      view.stride(1)};
  for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
    sequences_[s].*start = sizes_.packed
                               ? query_offsets_[static_cast<std::size_t>(s)] * view.stride(2)
                               : s * view.stride(0);
  }
}

void Problem::set_out(const ConstTensorView& out) {
  set_operand(out, query_offsets_, &AttentionParams::out, &Sequence::out);
}
void Problem::set_lse(const ConstTensorView& lse) {
  set_lse_operand(lse, &AttentionParams::lse, &Sequence::lse);
}
void Problem::set_dout(const ConstTensorView& dout) {
  set_operand(dout, query_offsets_, &AttentionParams::dout, &Sequence::dout);
}
void Problem::set_dlse(const ConstTensorView& dlse) {
  set_lse_operand(dlse, &AttentionParams::dlse, &Sequence::dlse);
}
void Problem::set_dq(const TensorView& dq) {
  set_operand(dq, query_offsets_, &AttentionParams::dq, &Sequence::dq);
}
void Problem::set_dk(const TensorView& dk) {
  set_operand(dk, kv_offsets_, &AttentionParams::dk, &Sequence::dk);
}
void Problem::set_dv(const TensorView& dv) {
  set_operand(dv, kv_offsets_, &AttentionParams::dv, &Sequence::dv);
}

}  // namespace ladon
