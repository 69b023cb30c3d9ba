// Forward of LatentAttention without a cache, and its steps one by one.

#include <memory>
#include <string>
#include <utility>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/fail.h"
#include "layers/latent_steps.h"
#include "layers/layer_call.h"
#include "layers/layer_output.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::forward";

/// The input of a single step, as [batch, seq, width].
ConstTensorView check_step(std::string_view name, const Context& context,
                           const LatentAttention& layer, const NamedView& argument,
                           std::int64_t width) {
  const Operation operation(name, context);
  check_device(operation, "layer", layer.device());
  return check_tokens(operation, argument, layer.dtype(), width);
}

class Forward {
 public:
  Forward(const Context& context, const LatentHeads& heads, const CheckedInputs& inputs,
          const LayerCall& call)
      : context_(context), heads_(heads), steps_(context, heads), inputs_(inputs), call_(call) {}

  AttendedHeads project() {
    make_queries();
    make_latents();
    return std::move(result_);
  }

  AttendedHeads run(bool saves) {
    make_queries();
    make_latents();
    result_.options = attention_options(steps_, heads_, call_, query_len(), kv_len());
    result_.attended = tensor(query_len(), {heads_.num_heads(), heads_.value_dim()});
    if (!saves && heads_.form_for(query_len(), kv_len()) == LatentForm::kAbsorbed) {
      attend_absorbed();
    } else {
      attend_expanded(saves);
    }
    return std::move(result_);
  }

 private:
  std::int64_t query_len() const { return inputs_.query.size(1); }
  std::int64_t kv_len() const { return inputs_.key.size(1); }

  /// [batch, seq, ...] of the layer's dtype.
  Tensor tensor(std::int64_t seq, std::initializer_list<std::int64_t> rest) const {
    return tensor_of(heads_.dtype(), seq, rest);
  }
  Tensor tensor_of(DType dtype, std::int64_t seq, std::initializer_list<std::int64_t> rest) const {
    std::vector<std::int64_t> shape = {inputs_.query.size(0), seq};
    shape.insert(shape.end(), rest.begin(), rest.end());
    return Tensor::uninitialized(context_, dtype, Dims(shape));
  }

  void make_queries() {
    const InputRows rows(context_, inputs_.query);
    Tensor& queries = result_.queries =
        tensor(query_len(), {heads_.num_heads(), heads_.head_dim()});
    if (steps_.low_rank()) {
      Tensor& low = result_.low = tensor(query_len(), {heads_.query_rank()});
      Tensor& normed_low = result_.normed_low = tensor(query_len(), {heads_.query_rank()});
      steps_.project_low(rows.view(), rows_of(low));
      steps_.norm_low(rows_of(std::as_const(low)), rows_of(normed_low));
      steps_.project_queries(rows_of(std::as_const(normed_low)), merged(queries));
    } else {
      steps_.project_queries(rows.view(), merged(queries));
    }
    steps_.rotate_queries(merged(queries), query_len(), call_.query_positions);
  }

  void make_latents() {
    const InputRows rows(context_, inputs_.key);
    Tensor& compressed = result_.compressed = tensor(kv_len(), {heads_.latent_dim()});
    steps_.project_latents(rows.view(), rows_of(compressed));
    Tensor& latents = result_.latents = compressed.clone();
    steps_.norm_latents(rows_of(std::as_const(compressed)), rows_of(latents));
    steps_.rotate_latents(rows_of(latents), kv_len(), call_.key_positions);
  }

  void attend_expanded(bool saves) {
    AttendedHeads& r = result_;
    r.keys = tensor(kv_len(), {heads_.num_heads(), heads_.head_dim()});
    r.values = tensor(kv_len(), {heads_.num_heads(), heads_.value_dim()});
    steps_.expand_keys(rows_of(std::as_const(r.latents)), merged(r.keys));
    steps_.expand_values(rows_of(std::as_const(r.latents)), merged(r.values));
    if (saves) {
      r.lse = Tensor::uninitialized(context_, steps_.compute_dtype(),
                                    {inputs_.query.size(0), heads_.num_heads(), query_len()});
    }
    attend(context_, r.queries, r.keys, r.values, r.options, r.attended, r.lse);
    if (!call_.weights.absent()) {
      attention_weights(context_, r.queries, r.keys, r.options, call_.weights);
    }
  }

  void attend_absorbed() {
    AttendedHeads& r = result_;
    const DType dtype = steps_.absorbed_dtype(r.latents.dtype());
    Tensor absorbed =
        tensor_of(steps_.compute_dtype(), query_len(), {heads_.num_heads(), heads_.latent_dim()});
    steps_.absorb_queries(merged(std::as_const(r.queries)), merged(absorbed));
    if (dtype != absorbed.dtype()) absorbed = Tensor::copy_of(context_, absorbed, dtype);
    Tensor sums = tensor_of(dtype, query_len(), {heads_.num_heads(), heads_.kv_rank()});
    const ConstTensorView keys = one_head(r.latents);
    attend(context_, absorbed, keys, keys.slice(3, 0, heads_.kv_rank()), r.options, sums, {},
           {.group = heads_.whole_heads});
    steps_.apply_values(merged(std::as_const(sums)), merged(r.attended));
    if (!call_.weights.absent()) {
      attention_weights(context_, absorbed, keys, r.options, call_.weights);
    }
  }

  const Context& context_;
  const LatentHeads heads_;
  const Steps steps_;
  const CheckedInputs inputs_;
  const LayerCall& call_;
  AttendedHeads result_;
};

/// The output projection, [batch, seq, embed_dim] or [seq, embed_dim].
void project_output(const Context& context, const LatentAttention& layer, const Dims& shape,
                    const Tensor& attended, LayerOutput& out) {
  const OutputRows rows(context, out.open(context, layer.dtype(), shape));
  Steps(context, layer).project_out(merged(attended), rows.view());
  rows.finish(context);
}

}  // namespace

CheckedInputs latent::check_call(const Operation& operation, const AttentionLayer& layer,
                                 const LatentAttentionOptions& options, const LayerInputs& inputs,
                                 const LayerCall& call) {
  check_device(operation, "layer", layer.device());
  if (!inputs.value.absent()) {
    fail(ErrorCode::kUnsupported, operation, "value",
         got_shape(inputs.value) + ", expected none: values come from the latents of key");
  }
  CheckedInputs checked;
  checked.query =
      check_tokens(operation, {"query", inputs.query}, options.dtype, options.embed_dim);
  checked.self = inputs.key.absent();
  checked.key = checked.query;
  if (!checked.self) {
    checked.key = check_tokens(operation, {"key", inputs.key}, options.dtype, options.embed_dim);
    if (inputs.key.rank() != inputs.query.rank() || checked.key.size(0) != checked.query.size(0)) {
      fail(operation, "key",
           got_shape(inputs.key) + ", expected a batch as in query's " +
               inputs.query.shape().to_string());
    }
  }
  check_layer_call(operation, call,
                   {.batch = checked.query.size(0),
                    .num_heads = options.num_heads,
                    .query_len = checked.query.size(1),
                    .kv_len = checked.key.size(1),
                    .rope = options.rope_dim != 0});
  check_apart(operation, {"weights", call.weights}, {"query", checked.query});
  check_apart(operation, {"weights", call.weights}, {"key", checked.key});
  return checked;
}

AttentionOptions latent::attention_options(const Steps& steps, const LatentHeads& heads,
                                           const LayerCall& call, std::int64_t query_len,
                                           std::int64_t kv_len) {
  AttentionOptions options = steps.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.kv_lengths = call.kv_lengths;
  // Token i of a sequence has position i, however many of the tokens after it are padding.
  if (query_len == kv_len) options.alignment = Alignment::kTopLeft;
  if (heads.layer.is_training()) {
    options.dropout.probability = heads.options.dropout;
    options.dropout.seed = call.dropout_seed;
  }
  return options;
}

AttendedHeads latent::project_heads(const Context& context, const LatentHeads& heads,
                                    const CheckedInputs& inputs, const LayerCall& call) {
  return Forward(context, heads, inputs, call).project();
}

AttendedHeads latent::attend_heads(const Context& context, const LatentHeads& heads,
                                   const CheckedInputs& inputs, const LayerCall& call, bool saves) {
  return Forward(context, heads, inputs, call).run(saves);
}

void latent::keep_forward(const Context& context, const CheckedInputs& inputs,
                          const LayerCall& call, AttendedHeads& heads, Saved& saved) {
  saved.self = inputs.self;
  saved.x = Tensor::copy_of(context, inputs.query);
  if (!inputs.self) saved.key = Tensor::copy_of(context, inputs.key);
  saved.low = std::move(heads.low);
  saved.normed_low = std::move(heads.normed_low);
  saved.compressed = std::move(heads.compressed);
  saved.latents = std::move(heads.latents);
  saved.queries = std::move(heads.queries);
  saved.keys = std::move(heads.keys);
  saved.values = std::move(heads.values);
  saved.attended = std::move(heads.attended);
  saved.lse = std::move(heads.lse);
  saved.keep_call(context, heads.options, call);
}

void LatentAttention::run_forward(const Context& context, const LayerInputs& inputs,
                                  const LayerCall& call, LayerOutput& out,
                                  SavedForward* saved) const {
  const Operation operation(kOperation, context);
  const CheckedInputs checked = check_call(operation, *this, options_, inputs, call);
  check_output(operation, *this, inputs, call, out);
  AttendedHeads heads = attend_heads(context, *this, checked, call, saved != nullptr);
  const Dims& shape = inputs.query.shape();
  if (saved == nullptr) return project_output(context, *this, shape, heads.attended, out);
  auto kept = std::make_unique<Saved>(*this, identity_);
  kept->batched = shape.rank() == 3;
  keep_forward(context, checked, call, heads, *kept);
  project_output(context, *this, shape, kept->attended, out);
  *saved = SavedForward(std::move(kept));
}

Tensor LatentAttention::compress(const Context& context, const ConstTensorView& x,
                                 const RopePositions& positions) const {
  const ConstTensorView tokens =
      check_step("LatentAttention::compress", context, *this, {"x", x}, embed_dim());
  const Steps steps(context, *this);
  if (rope_dim() != 0) {
    rope_internal::check_positions("LatentAttention::compress", "positions", positions,
                                   tokens.size(0), tokens.size(1));
  }
  Tensor latents =
      Tensor::uninitialized(context, dtype(), {tokens.size(0), tokens.size(1), latent_dim()});
  steps.project_latents(InputRows(context, tokens).view(), rows_of(latents));
  steps.norm_latents(rows_of(std::as_const(latents)), rows_of(latents));
  steps.rotate_latents(rows_of(latents), tokens.size(1), positions);
  return x.rank() == 3 ? std::move(latents) : without_batch(context, latents);
}

Tensor LatentAttention::expand_keys(const Context& context, const ConstTensorView& latents) const {
  const ConstTensorView tokens = check_step("LatentAttention::expand_keys", context, *this,
                                            {"latents", latents}, latent_dim());
  Tensor keys = Tensor::uninitialized(context, dtype(),
                                      {tokens.size(0), tokens.size(1), num_heads(), head_dim()});
  Steps(context, *this).expand_keys(InputRows(context, tokens).view(), merged(keys));
  return keys;
}

Tensor LatentAttention::expand_values(const Context& context,
                                      const ConstTensorView& latents) const {
  const ConstTensorView tokens = check_step("LatentAttention::expand_values", context, *this,
                                            {"latents", latents}, latent_dim());
  Tensor values = Tensor::uninitialized(context, dtype(),
                                        {tokens.size(0), tokens.size(1), num_heads(), value_dim()});
  Steps(context, *this).expand_values(InputRows(context, tokens).view(), merged(values));
  return values;
}

}  // namespace ladon
