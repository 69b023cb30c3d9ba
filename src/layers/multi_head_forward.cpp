// Forward of MultiHeadAttention: checks, projections, attention, and what is kept for backward.

#include <memory>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/multi_head.h"
#include "layers/projection.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::forward";

/// The inputs of a call, all three [batch, seq, width].
struct CheckedInputs {
  ConstTensorView query, key, value;
  bool self = false;       // key and value are the query
  bool own_value = false;  // value was given
  bool batched = true;
};

void check_width(const NamedView& argument, std::int64_t width) {
  const int last = argument.view.rank() - 1;
  if (argument.view.size(last) != width) {
    fail(kOperation, argument.name,
         got_shape(argument.view) + ", expected a width of " + std::to_string(width));
  }
}

CheckedInputs check_inputs(const MultiHeadAttentionOptions& options, const LayerInputs& inputs) {
  CheckedInputs checked;
  checked.self = inputs.key.absent();
  checked.own_value = !inputs.value.absent();
  check_present(kOperation, {"query", inputs.query});
  const int rank = inputs.query.rank();
  if (rank != 2 && rank != 3) {
    fail(kOperation, "query",
         got_shape(inputs.query) + ", expected [batch, seq, embed_dim] or [seq, embed_dim]");
  }
  checked.batched = rank == 3;
  const auto check = [&](const NamedView& argument, std::int64_t width) {
    check_view(kOperation, argument, rank);
    check_dtype(kOperation, argument, options.dtype);
    check_width(argument, width);
    return with_batch(argument.view);
  };
  checked.query = check({"query", inputs.query}, options.embed_dim);
  if (checked.self && checked.own_value) {
    fail(kOperation, "key", "got none beside a value, expected a tensor");
  }
  if (checked.self) {
    if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
      fail(kOperation, "key",
           "got none, expected a tensor because key_dim or value_input_dim is not embed_dim");
    }
    checked.key = checked.query;
    checked.value = checked.query;
    return checked;
  }
  checked.key = check({"key", inputs.key}, options.key_dim);
  if (checked.own_value) {
    checked.value = check({"value", inputs.value}, options.value_input_dim);
  } else {
    if (options.value_input_dim != options.key_dim) {
      fail(kOperation, "value",
           "got none, expected a tensor because value_input_dim is not key_dim");
    }
    checked.value = checked.key;
  }
  if (checked.key.size(0) != checked.query.size(0)) {
    fail(kOperation, "key",
         "got a batch of " + std::to_string(checked.key.size(0)) + ", expected query's " +
             std::to_string(checked.query.size(0)));
  }
  if (checked.value.size(0) != checked.key.size(0) ||
      checked.value.size(1) != checked.key.size(1)) {
    fail(kOperation, "value",
         got_shape(inputs.value) + ", expected as many sequences and positions as in key's " +
             inputs.key.shape().to_string());
  }
  return checked;
}

/// A query that sees its own position and nothing else has a softmax of 1: attention gives the
/// value itself, whatever q and k are. True only where that can be told without looking at data.
bool is_one_position(const CheckedInputs& inputs, const AttentionOptions& options,
                     const LayerCall& call) {
  // Explicit positions are left to rope(), which checks them.
  return call.query_positions.explicit_positions.empty() &&
         call.key_positions.explicit_positions.empty() && inputs.self &&
         inputs.query.size(1) == 1 && options.mask.absent() && options.bias.absent() &&
         options.kv_lengths.empty() && options.sinks.absent() && options.dropout.probability == 0 &&
         call.weights.absent();
}

/// [batch, 1, kv_heads, dim] to [batch, 1, heads, dim]: each query head gets its KV head's value.
Tensor spread_values(const Tensor& v, std::int64_t num_heads) {
  Tensor out = Tensor::uninitialized(v.dtype(), {v.size(0), v.size(1), num_heads, v.size(3)});
  const std::int64_t group = num_heads / v.size(2);
  for (std::int64_t head = 0; head < num_heads; ++head) {
    copy(v.view().slice(2, head / group, head / group + 1), out.view().slice(2, head, head + 1));
  }
  return out;
}

/// The forward pass; with `saved`, moves into it what backward needs.
Tensor run_forward(const Context& context, const MultiHeadAttention& layer,
                   const CheckedInputs& inputs, const LayerCall& call, Saved* saved) {
  const Pass pass(context, layer);
  AttentionOptions options = pass.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.kv_lengths = call.kv_lengths;
  if (layer.is_training()) {
    options.dropout = {.probability = layer.options().dropout, .seed = call.dropout_seed};
  }
  // Token i of a sequence stands at position i, however many of the tokens after it are padding.
  if (inputs.self) options.alignment = Alignment::kTopLeft;
  for (const NamedView& input : {NamedView{"query", inputs.query}, NamedView{"key", inputs.key},
                                 NamedView{"value", inputs.value}}) {
    check_apart(kOperation, {"weights", call.weights}, input);
  }
  const bool one_position = is_one_position(inputs, options, call);
  Tensor v = pass.project_heads(inputs.value, "v_proj", layer.num_kv_heads());
  Tensor q;
  Tensor k;
  Tensor attended;
  Tensor lse;
  if (one_position) {
    attended = spread_values(v, layer.num_heads());
  } else {
    q = pass.project_heads(inputs.query, "q_proj", layer.num_heads());
    k = pass.project_heads(inputs.key, "k_proj", layer.num_kv_heads());
    pass.place(q, "q_norm.weight", call.query_positions);
    pass.place(k, "k_norm.weight", call.key_positions);
    attended = Tensor::uninitialized(layer.dtype(), q.shape());
    if (saved != nullptr) {
      lse = Tensor::uninitialized(layer.dtype() == DType::kF64 ? DType::kF64 : DType::kF32,
                                  {q.size(0), q.size(2), q.size(1)});
      attention(context, q, k, v, options, attended, lse);
    } else {
      attention(context, q, k, v, options, attended);
    }
  }
  Tensor out = Tensor::uninitialized(
      layer.dtype(), {inputs.query.size(0), inputs.query.size(1), layer.embed_dim()});
  project(context, merged(std::as_const(attended)), pass.weight("out_proj.weight"),
          pass.weight("out_proj.bias"), rows_of(out));
  if (!call.weights.absent()) attention_weights(context, q, k, options, call.weights);
  if (saved != nullptr) {
    saved->one_position = one_position;
    saved->q = std::move(q);
    saved->k = std::move(k);
    saved->v = std::move(v);
    saved->attended = std::move(attended);
    saved->lse = std::move(lse);
    saved->keep_call(options, call);
  }
  if (inputs.batched) return out;
  Tensor flat = Tensor::uninitialized(layer.dtype(), {out.size(1), out.size(2)});
  copy(out.view().select(0, 0), flat);
  return flat;
}

/// Copies of the inputs, so that the saved state stands alone.
void keep_inputs(const CheckedInputs& inputs, Saved& saved) {
  saved.self = inputs.self;
  saved.own_value = inputs.own_value;
  saved.batched = inputs.batched;
  saved.query = Tensor::copy_of(inputs.query);
  if (!inputs.self) saved.key = Tensor::copy_of(inputs.key);
  if (inputs.own_value) saved.value = Tensor::copy_of(inputs.value);
}

}  // namespace

Tensor MultiHeadAttention::forward(const Context& context, const LayerInputs& inputs,
                                   const LayerCall& call) const {
  return run_forward(context, *this, check_inputs(options_, inputs), call, nullptr);
}

TrainingForward MultiHeadAttention::forward_training(const Context& context,
                                                     const LayerInputs& inputs,
                                                     const LayerCall& call) const {
  const CheckedInputs checked = check_inputs(options_, inputs);
  auto saved = std::make_unique<Saved>(identity_);
  Tensor out = run_forward(context, *this, checked, call, saved.get());
  keep_inputs(checked, *saved);
  return {std::move(out), SavedForward(std::move(saved))};
}

}  // namespace ladon
