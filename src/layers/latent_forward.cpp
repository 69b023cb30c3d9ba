// Forward of LatentAttention without a cache, and its steps one by one.

#include <memory>
#include <string>
#include <utility>

#include "attention/attend.h"
#include "core/checks.h"
#include "core/fail.h"
#include "layers/latent_steps.h"
#include "layers/layer_call.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::forward";

/// [batch, seq, embed_dim] each; keys, and values with them, come from `key`.
struct CheckedInputs {
  ConstTensorView query;
  ConstTensorView key;
  bool self = true;  // key is query
};

/// All that can be refused, before anything is computed.
CheckedInputs check_call(const Context& context, const LatentAttention& layer,
                         const LayerInputs& inputs, const LayerCall& call) {
  const Operation operation(kOperation, context);
  check_device(operation, "layer", layer.device());
  if (!inputs.value.absent()) {
    fail(ErrorCode::kUnsupported, operation, "value",
         got_shape(inputs.value) + ", expected none: values come from the latents of key");
  }
  CheckedInputs checked;
  checked.query =
      check_tokens(operation, {"query", inputs.query}, layer.dtype(), layer.embed_dim());
  checked.self = inputs.key.absent();
  checked.key = checked.query;
  if (!checked.self) {
    checked.key = check_tokens(operation, {"key", inputs.key}, layer.dtype(), layer.embed_dim());
    if (inputs.key.rank() != inputs.query.rank() || checked.key.size(0) != checked.query.size(0)) {
      fail(operation, "key",
           got_shape(inputs.key) + ", expected a batch as in query's " +
               inputs.query.shape().to_string());
    }
  }
  check_layer_call(operation, call,
                   {.batch = checked.query.size(0),
                    .num_heads = layer.num_heads(),
                    .query_len = checked.query.size(1),
                    .kv_len = checked.key.size(1),
                    .rope = layer.rope_dim() != 0});
  check_apart(operation, {"weights", call.weights}, {"query", checked.query});
  check_apart(operation, {"weights", call.weights}, {"key", checked.key});
  return checked;
}

/// The input of a single step, as [batch, seq, width].
ConstTensorView check_step(std::string_view name, const Context& context,
                           const LatentAttention& layer, const NamedView& argument,
                           std::int64_t width) {
  const Operation operation(name, context);
  check_device(operation, "layer", layer.device());
  return check_tokens(operation, argument, layer.dtype(), width);
}

/// The forward pass; with `saved`, keeps in it what backward needs and takes the expanded form.
class Forward {
 public:
  Forward(const Context& context, const LatentAttention& layer, const CheckedInputs& inputs,
          const LayerCall& call, Saved* saved)
      : context_(context),
        layer_(layer),
        steps_(context, layer),
        inputs_(inputs),
        call_(call),
        saved_(saved),
        options_(steps_.attention_options(call.causal)) {
    options_.mask = call.mask;
    options_.bias = call.bias;
    options_.kv_lengths = call.kv_lengths;
    // Token i of a sequence has position i, however many of the tokens after it are padding.
    if (query_len() == kv_len()) options_.alignment = Alignment::kTopLeft;
    if (layer.is_training()) {
      options_.dropout = {.probability = layer.options().dropout, .seed = call.dropout_seed};
    }
  }

  Tensor run() {
    make_queries();
    make_latents();
    attended_ = tensor(query_len(), {layer_.num_heads(), layer_.value_dim()});
    const bool absorbed =
        saved_ == nullptr && layer_.form_for(query_len(), kv_len()) == LatentForm::kAbsorbed;
    if (absorbed) {
      attend_absorbed();
    } else {
      attend_expanded();
    }
    Tensor out = tensor(query_len(), {layer_.embed_dim()});
    steps_.project_out(merged(std::as_const(attended_)), rows_of(out));
    if (saved_ != nullptr) save();
    return out;
  }

 private:
  std::int64_t query_len() const { return inputs_.query.size(1); }
  std::int64_t kv_len() const { return inputs_.key.size(1); }

  /// [batch, seq, ...] of the layer's dtype.
  Tensor tensor(std::int64_t seq, std::initializer_list<std::int64_t> rest) const {
    return tensor_of(layer_.dtype(), seq, rest);
  }
  Tensor tensor_of(DType dtype, std::int64_t seq, std::initializer_list<std::int64_t> rest) const {
    std::vector<std::int64_t> shape = {inputs_.query.size(0), seq};
    shape.insert(shape.end(), rest.begin(), rest.end());
    return Tensor::uninitialized(context_, dtype, Dims(shape));
  }

  void make_queries() {
    const InputRows rows(context_, inputs_.query);
    queries_ = tensor(query_len(), {layer_.num_heads(), layer_.head_dim()});
    if (steps_.low_rank()) {
      low_ = tensor(query_len(), {layer_.query_rank()});
      normed_low_ = tensor(query_len(), {layer_.query_rank()});
      steps_.project_low(rows.view(), rows_of(low_));
      steps_.norm_low(rows_of(std::as_const(low_)), rows_of(normed_low_));
      steps_.project_queries(rows_of(std::as_const(normed_low_)), merged(queries_));
    } else {
      steps_.project_queries(rows.view(), merged(queries_));
    }
    steps_.rotate_queries(merged(queries_), query_len(), call_.query_positions);
  }

  void make_latents() {
    const InputRows rows(context_, inputs_.key);
    compressed_ = tensor(kv_len(), {layer_.latent_dim()});
    steps_.project_latents(rows.view(), rows_of(compressed_));
    latents_ = compressed_.clone();
    steps_.norm_latents(rows_of(std::as_const(compressed_)), rows_of(latents_));
    steps_.rotate_latents(rows_of(latents_), kv_len(), call_.key_positions);
  }

  void attend_expanded() {
    keys_ = tensor(kv_len(), {layer_.num_heads(), layer_.head_dim()});
    values_ = tensor(kv_len(), {layer_.num_heads(), layer_.value_dim()});
    steps_.expand_keys(rows_of(std::as_const(latents_)), merged(keys_));
    steps_.expand_values(rows_of(std::as_const(latents_)), merged(values_));
    if (saved_ != nullptr) {
      lse_ = Tensor::uninitialized(context_, steps_.compute_dtype(),
                                   {inputs_.query.size(0), layer_.num_heads(), query_len()});
    }
    attend(context_, queries_, keys_, values_, options_, attended_, lse_);
    if (!call_.weights.absent()) {
      attention_weights(context_, queries_, keys_, options_, call_.weights);
    }
  }

  void attend_absorbed() {
    const DType dtype = steps_.absorbed_dtype(latents_.dtype());
    Tensor absorbed =
        tensor_of(steps_.compute_dtype(), query_len(), {layer_.num_heads(), layer_.latent_dim()});
    steps_.absorb_queries(merged(std::as_const(queries_)), merged(absorbed));
    if (dtype != absorbed.dtype()) absorbed = Tensor::copy_of(context_, absorbed, dtype);
    Tensor sums = tensor_of(dtype, query_len(), {layer_.num_heads(), layer_.kv_rank()});
    const ConstTensorView keys = one_head(latents_);
    attend(context_, absorbed, keys, keys.slice(3, 0, layer_.kv_rank()), options_, sums);
    steps_.apply_values(merged(std::as_const(sums)), merged(attended_));
    if (!call_.weights.absent()) {
      attention_weights(context_, absorbed, keys, options_, call_.weights);
    }
  }

  void save() {
    saved_->self = inputs_.self;
    saved_->x = Tensor::copy_of(context_, inputs_.query);
    if (!inputs_.self) saved_->key = Tensor::copy_of(context_, inputs_.key);
    saved_->low = std::move(low_);
    saved_->normed_low = std::move(normed_low_);
    saved_->compressed = std::move(compressed_);
    saved_->latents = std::move(latents_);
    saved_->queries = std::move(queries_);
    saved_->keys = std::move(keys_);
    saved_->values = std::move(values_);
    saved_->attended = std::move(attended_);
    saved_->lse = std::move(lse_);
    saved_->keep_call(context_, options_, call_);
  }

  const Context& context_;
  const LatentAttention& layer_;
  const Steps steps_;
  const CheckedInputs inputs_;
  const LayerCall& call_;
  Saved* const saved_;
  AttentionOptions options_;
  Tensor low_, normed_low_, queries_, compressed_, latents_, keys_, values_, attended_, lse_;
};

}  // namespace

Tensor LatentAttention::forward(const Context& context, const LayerInputs& inputs,
                                const LayerCall& call) const {
  const CheckedInputs checked = check_call(context, *this, inputs, call);
  Tensor out = Forward(context, *this, checked, call, nullptr).run();
  return inputs.query.rank() == 3 ? std::move(out) : without_batch(context, out);
}

TrainingForward LatentAttention::forward_training(const Context& context, const LayerInputs& inputs,
                                                  const LayerCall& call) const {
  const CheckedInputs checked = check_call(context, *this, inputs, call);
  auto saved = std::make_unique<Saved>(*this, identity_);
  saved->batched = inputs.query.rank() == 3;
  Tensor out = Forward(context, *this, checked, call, saved.get()).run();
  if (!saved->batched) out = without_batch(context, out);
  return {std::move(out), SavedForward(std::move(saved))};
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
