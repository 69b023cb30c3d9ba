// Forward of MultiHeadAttention: checks, projections, attention, and what is kept for backward.

#include <memory>
#include <string>
#include <utility>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/fail.h"
#include "ladon/head_ops.h"
#include "layers/layer_call.h"
#include "layers/layer_output.h"
#include "layers/multi_head.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::forward";

CheckedInputs check_inputs(const Operation& operation, const MultiHeadAttentionOptions& options,
                           const LayerInputs& inputs) {
  CheckedInputs checked;
  checked.self = inputs.key.absent();
  checked.own_value = !inputs.value.absent();
  check_present(operation, {"query", inputs.query});
  const int rank = inputs.query.rank();
  checked.batched = rank == 3;
  const auto check = [&](const NamedView& argument, std::int64_t width) {
    if (rank == 2 || rank == 3) check_view(operation, argument, rank);
    return check_tokens(operation, argument, options.dtype, width);
  };
  checked.query = check({"query", inputs.query}, options.embed_dim);
  if (checked.self && checked.own_value) {
    fail(operation, "key", "got none with a value, expected a tensor");
  }
  if (checked.self) {
    if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
      fail(operation, "key",
           "got none, expected a tensor because key_dim or value_input_dim is "
           "not embed_dim");
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
      fail(operation, "value",
           "got none, expected a tensor because value_input_dim is not key_dim");
    }
    checked.value = checked.key;
  }
  if (checked.key.size(0) != checked.query.size(0)) {
    fail(operation, "key",
         "got a batch of " + std::to_string(checked.key.size(0)) + ", expected query's " +
             std::to_string(checked.query.size(0)));
  }
  if (checked.value.size(0) != checked.key.size(0) ||
      checked.value.size(1) != checked.key.size(1)) {
    fail(operation, "value",
         got_shape(inputs.value) + ", expected as many sequences and positions as in key's " +
             inputs.key.shape().to_string());
  }
  return checked;
}

/// A query that sees its own position and nothing else has a softmax of 1: attention gives the
/// value itself, whatever q and k are. True only where that can be told without looking at data.
bool is_one_position(const CheckedInputs& inputs, const AttentionOptions& options,
                     const LayerCall& call) {
  return inputs.self && inputs.query.size(1) == 1 && options.mask.absent() &&
         options.bias.absent() && options.kv_lengths.empty() && options.sinks.absent() &&
         options.dropout.probability == 0 && call.weights.absent();
}

}  // namespace

CheckedInputs multi_head::check_call(const Operation& operation, const AttentionLayer& layer,
                                     const MultiHeadAttentionOptions& options,
                                     const LayerInputs& inputs, const LayerCall& call) {
  check_device(operation, "layer", layer.device());
  const CheckedInputs checked = check_inputs(operation, options, inputs);
  check_layer_call(operation, call,
                   {.batch = checked.query.size(0),
                    .num_heads = options.num_heads,
                    .query_len = checked.query.size(1),
                    .kv_len = checked.key.size(1),
                    .rope = options.rope.has_value()});
  for (const NamedView& input : {NamedView{"query", checked.query}, NamedView{"key", checked.key},
                                 NamedView{"value", checked.value}}) {
    check_apart(operation, {"weights", call.weights}, input);
  }
  return checked;
}

AttendedHeads multi_head::attend_heads(const Context& context, const LayerHeads& heads,
                                       const CheckedInputs& inputs, const LayerCall& call,
                                       bool keeps_lse) {
  const Steps steps(context, heads);
  const MultiHeadAttentionOptions& layer = heads.options;
  AttendedHeads result;
  AttentionOptions& options = result.options;
  options = steps.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.kv_lengths = call.kv_lengths;
  if (heads.layer.is_training()) {
    options.dropout.probability = layer.dropout;
    options.dropout.seed = call.dropout_seed;
  }
  // Token i of a sequence has position i, however many of the tokens after it are padding.
  if (inputs.query.size(1) == inputs.key.size(1)) options.alignment = Alignment::kTopLeft;
  result.one_position = is_one_position(inputs, options, call);
  if (result.one_position) {
    result.v = steps.project_heads(inputs.value, heads.plan.value, layer.num_kv_heads);
    result.attended = repeat_kv(context, result.v, layer.num_heads / layer.num_kv_heads);
    return result;
  }
  steps.project_heads(inputs, result.q, result.k, result.v);
  steps.norm_and_rope(result.q, call.query_positions, result.k, call.key_positions);
  const Dims& shape = result.q.shape();
  result.attended = Tensor::uninitialized(context, layer.dtype, shape);
  if (keeps_lse) {
    result.lse =
        Tensor::uninitialized(context, compute_dtype(layer.dtype), {shape[0], shape[2], shape[1]});
  }
  attend(context, result.q, result.k, result.v, options, result.attended, result.lse,
         {.group = heads.whole_group});
  return result;
}

void multi_head::keep_forward(const Context& context, const CheckedInputs& inputs,
                              const LayerCall& call, AttendedHeads& heads, Saved& saved) {
  saved.one_position = heads.one_position;
  saved.q = std::move(heads.q);
  saved.k = std::move(heads.k);
  saved.v = std::move(heads.v);
  saved.attended = std::move(heads.attended);
  saved.lse = std::move(heads.lse);
  saved.keep_call(context, heads.options, call);
  saved.self = inputs.self;
  saved.own_value = inputs.own_value;
  saved.batched = inputs.batched;
  saved.query = Tensor::copy_of(context, inputs.query);
  if (!inputs.self) saved.key = Tensor::copy_of(context, inputs.key);
  if (inputs.own_value) saved.value = Tensor::copy_of(context, inputs.value);
}

namespace {

/// The output projection.
void project_output(const Context& context, const MultiHeadAttention& layer, const Dims& shape,
                    const Tensor& attended, LayerOutput& out) {
  const OutputRows rows(context, out.open(context, layer.dtype(), shape));
  Steps(context, layer).project_rows(merged(attended), layer.plan().out, rows.view());
  rows.finish(context);
}

}  // namespace

void MultiHeadAttention::run_forward(const Context& context, const LayerInputs& inputs,
                                     const LayerCall& call, LayerOutput& out,
                                     SavedForward* saved) const {
  const Operation operation(kOperation, context);
  const CheckedInputs checked = check_call(operation, *this, options_, inputs, call);
  check_output(operation, *this, inputs, call, out);
  AttendedHeads heads = attend_heads(context, *this, checked, call, saved != nullptr);
  if (!call.weights.absent()) {
    attention_weights(context, heads.q, heads.k, heads.options, call.weights);
  }
  const Dims& shape = inputs.query.shape();
  if (saved == nullptr) return project_output(context, *this, shape, heads.attended, out);
  auto kept = std::make_unique<Saved>(*this, identity_);
  keep_forward(context, checked, call, heads, *kept);
  project_output(context, *this, shape, kept->attended, out);
  *saved = SavedForward(std::move(kept));
}

}  // namespace ladon
