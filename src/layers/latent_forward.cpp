// Forward of LatentAttention without a cache, and its steps one by one.

#include <memory>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"
#include "layers/latent_pass.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::forward";

/// [batch, seq, width] of a tensor that may come without a batch.
ConstTensorView check_tokens(std::string_view operation, const NamedView& argument, DType dtype,
                             std::int64_t width) {
  const ConstTensorView& x = argument.view;
  check_present(operation, argument);
  if (x.rank() != 2 && x.rank() != 3) {
    fail(operation, argument.name,
         got_shape(x) + ", expected [batch, seq, " + std::to_string(width) + "] or [seq, " +
             std::to_string(width) + "]");
  }
  check_view(operation, argument, x.rank());
  check_dtype(operation, argument, dtype);
  if (x.size(x.rank() - 1) != width) {
    fail(operation, argument.name, got_shape(x) + ", expected a width of " + std::to_string(width));
  }
  return with_batch(x);
}

ConstTensorView check_inputs(const LatentAttention& layer, const LayerInputs& inputs,
                             const LayerCall& call) {
  for (const NamedView& other : {NamedView{"key", inputs.key}, NamedView{"value", inputs.value}}) {
    if (!other.view.absent()) {
      fail(ErrorCode::kUnsupported, kOperation, other.name,
           got_shape(other.view) + ", expected none: latent attention is self-attention");
    }
  }
  const ConstTensorView x =
      check_tokens(kOperation, {"query", inputs.query}, layer.dtype(), layer.embed_dim());
  check_apart(kOperation, {"weights", call.weights}, {"query", x});
  return x;
}

/// A tensor without its batch of 1.
Tensor without_batch(const Tensor& tensor) {
  Tensor flat = Tensor::uninitialized(tensor.dtype(), {tensor.size(1), tensor.size(2)});
  copy(tensor.view().select(0, 0), flat);
  return flat;
}

/// The forward pass; with `saved`, keeps in it what backward needs and takes the expanded form.
class Forward {
 public:
  Forward(const Context& context, const LatentAttention& layer, const ConstTensorView& x,
          const LayerCall& call, Saved* saved)
      : context_(context),
        layer_(layer),
        pass_(context, layer),
        x_(x),
        call_(call),
        saved_(saved),
        options_(pass_.attention_options(call.causal)) {
    options_.mask = call.mask;
    options_.bias = call.bias;
    options_.kv_lengths = call.kv_lengths;
    // Token i of a sequence stands at position i, however many of the tokens after it are padding.
    options_.alignment = Alignment::kTopLeft;
    if (layer.is_training()) {
      options_.dropout = {.probability = layer.options().dropout, .seed = call.dropout_seed};
    }
  }

  Tensor run() {
    make_queries();
    make_latents();
    attended_ = tensor({layer_.num_heads(), layer_.value_dim()});
    const bool absorbed =
        saved_ == nullptr && layer_.form_for(x_.size(1), x_.size(1)) == LatentForm::kAbsorbed;
    if (absorbed) {
      attend_absorbed();
    } else {
      attend_expanded();
    }
    Tensor out = tensor({layer_.embed_dim()});
    pass_.project_out(merged(std::as_const(attended_)), rows_of(out));
    if (saved_ != nullptr) save();
    return out;
  }

 private:
  /// [batch, seq, ...] of the layer's dtype.
  Tensor tensor(std::initializer_list<std::int64_t> rest) const {
    return tensor_of(layer_.dtype(), rest);
  }
  Tensor tensor_of(DType dtype, std::initializer_list<std::int64_t> rest) const {
    std::vector<std::int64_t> shape = {x_.size(0), x_.size(1)};
    shape.insert(shape.end(), rest.begin(), rest.end());
    return Tensor::uninitialized(dtype, Dims(shape));
  }

  void make_queries() {
    const InputRows rows(x_);
    queries_ = tensor({layer_.num_heads(), layer_.head_dim()});
    if (pass_.low_rank()) {
      low_ = tensor({layer_.query_rank()});
      normed_low_ = tensor({layer_.query_rank()});
      pass_.project_low(rows.view(), rows_of(low_));
      pass_.norm_low(rows_of(std::as_const(low_)), rows_of(normed_low_));
      pass_.project_queries(rows_of(std::as_const(normed_low_)), merged(queries_));
    } else {
      pass_.project_queries(rows.view(), merged(queries_));
    }
    pass_.turn_queries(merged(queries_), x_.size(1), call_.query_positions);
  }

  void make_latents() {
    const InputRows rows(x_);
    compressed_ = tensor({layer_.latent_dim()});
    pass_.project_latents(rows.view(), rows_of(compressed_));
    latents_ = Tensor::copy_of(compressed_);
    pass_.norm_latents(rows_of(std::as_const(compressed_)), rows_of(latents_));
    pass_.turn_latents(rows_of(latents_), x_.size(1), call_.key_positions);
  }

  void attend_expanded() {
    keys_ = tensor({layer_.num_heads(), layer_.head_dim()});
    values_ = tensor({layer_.num_heads(), layer_.value_dim()});
    pass_.expand_keys(rows_of(std::as_const(latents_)), merged(keys_));
    pass_.expand_values(rows_of(std::as_const(latents_)), merged(values_));
    if (saved_ != nullptr) {
      lse_ = Tensor::uninitialized(pass_.compute_dtype(),
                                   {x_.size(0), layer_.num_heads(), x_.size(1)});
      attention(context_, queries_, keys_, values_, options_, attended_, lse_);
    } else {
      attention(context_, queries_, keys_, values_, options_, attended_);
    }
    if (!call_.weights.absent()) {
      attention_weights(context_, queries_, keys_, options_, call_.weights);
    }
  }

  void attend_absorbed() {
    const DType dtype = pass_.absorbed_dtype(latents_.dtype());
    Tensor absorbed = tensor_of(pass_.compute_dtype(), {layer_.num_heads(), layer_.latent_dim()});
    pass_.absorb_queries(merged(std::as_const(queries_)), merged(absorbed));
    if (dtype != absorbed.dtype()) absorbed = Tensor::copy_of(absorbed, dtype);
    Tensor sums = tensor_of(dtype, {layer_.num_heads(), layer_.kv_rank()});
    const ConstTensorView keys = one_head(latents_);
    attention(context_, absorbed, keys, keys.slice(3, 0, layer_.kv_rank()), options_, sums);
    pass_.apply_values(merged(std::as_const(sums)), merged(attended_));
    if (!call_.weights.absent()) {
      attention_weights(context_, absorbed, keys, options_, call_.weights);
    }
  }

  void save() {
    saved_->x = Tensor::copy_of(x_);
    saved_->low = std::move(low_);
    saved_->normed_low = std::move(normed_low_);
    saved_->compressed = std::move(compressed_);
    saved_->latents = std::move(latents_);
    saved_->queries = std::move(queries_);
    saved_->keys = std::move(keys_);
    saved_->values = std::move(values_);
    saved_->attended = std::move(attended_);
    saved_->lse = std::move(lse_);
    saved_->keep_call(options_, call_);
  }

  const Context& context_;
  const LatentAttention& layer_;
  const Pass pass_;
  const ConstTensorView x_;
  const LayerCall& call_;
  Saved* const saved_;
  AttentionOptions options_;
  Tensor low_, normed_low_, queries_, compressed_, latents_, keys_, values_, attended_, lse_;
};

}  // namespace

Tensor LatentAttention::forward(const Context& context, const LayerInputs& inputs,
                                const LayerCall& call) const {
  const ConstTensorView x = check_inputs(*this, inputs, call);
  Tensor out = Forward(context, *this, x, call, nullptr).run();
  return inputs.query.rank() == 3 ? std::move(out) : without_batch(out);
}

TrainingForward LatentAttention::forward_training(const Context& context, const LayerInputs& inputs,
                                                  const LayerCall& call) const {
  const ConstTensorView x = check_inputs(*this, inputs, call);
  auto saved = std::make_unique<Saved>(identity_);
  saved->batched = inputs.query.rank() == 3;
  Tensor out = Forward(context, *this, x, call, saved.get()).run();
  if (!saved->batched) out = without_batch(out);
  return {std::move(out), SavedForward(std::move(saved))};
}

Tensor LatentAttention::compress(const Context& context, const ConstTensorView& x,
                                 const RopePositions& positions) const {
  const ConstTensorView tokens =
      check_tokens("LatentAttention::compress", {"x", x}, dtype(), embed_dim());
  const Pass pass(context, *this);
  Tensor latents = Tensor::uninitialized(dtype(), {tokens.size(0), tokens.size(1), latent_dim()});
  pass.project_latents(InputRows(tokens).view(), rows_of(latents));
  pass.norm_latents(rows_of(std::as_const(latents)), rows_of(latents));
  pass.turn_latents(rows_of(latents), tokens.size(1), positions);
  return x.rank() == 3 ? std::move(latents) : without_batch(latents);
}

Tensor LatentAttention::expand_keys(const Context& context, const ConstTensorView& latents) const {
  const ConstTensorView tokens =
      check_tokens("LatentAttention::expand_keys", {"latents", latents}, dtype(), latent_dim());
  Tensor keys =
      Tensor::uninitialized(dtype(), {tokens.size(0), tokens.size(1), num_heads(), head_dim()});
  Pass(context, *this).expand_keys(InputRows(tokens).view(), merged(keys));
  return keys;
}

Tensor LatentAttention::expand_values(const Context& context,
                                      const ConstTensorView& latents) const {
  const ConstTensorView tokens =
      check_tokens("LatentAttention::expand_values", {"latents", latents}, dtype(), latent_dim());
  Tensor values =
      Tensor::uninitialized(dtype(), {tokens.size(0), tokens.size(1), num_heads(), value_dim()});
  Pass(context, *this).expand_values(InputRows(tokens).view(), merged(values));
  return values;
}

}  // namespace ladon
