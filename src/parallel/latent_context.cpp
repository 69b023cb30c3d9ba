#include "parallel/latent_context.h"

#include <string>

#include "attention/attend.h"
#include "core/fail.h"
#include "layers/layer_call.h"

namespace ladon::latent {
namespace {

std::int64_t length_of(const std::vector<std::vector<TokenRange>>& ranges) {
  std::int64_t length = 0;
  for (const std::vector<TokenRange>& of_rank : ranges) length += total_length(of_rank);
  return length;
}

}  // namespace

LatentContext::LatentContext(const Operation& operation, const Context& context,
                             const Communicator& communicator, const LatentAttention& layer,
                             const LayerInputs& inputs, const ContextPlan& plan,
                             const LayerCall& call)
    : context_(context), layer_(layer), rank_(communicator.rank()), steps_(context, layer) {
  check_device(operation, "layer", layer.device());
  check_call(operation, inputs, plan, call);
  const std::int64_t query_len = length_of(plan.queries);
  const std::int64_t kv_len = length_of(plan.keys);
  check_layer_call(operation, call,
                   {.batch = inputs_.query.size(0),
                    .num_heads = layer.num_heads(),
                    .query_len = query_len,
                    .kv_len = kv_len,
                    .rope = layer.rope_dim() != 0});
  options_ = attention_options(steps_, layer, call, query_len, kv_len);
  plan_ = plan;
  plan_.scheme = ContextScheme::kAllGather;
  make_whole(operation, communicator, inputs_.query.size(0), inputs_.query.size(1),
             inputs_.key.size(1));
  own_call_ = call;
  own_call_.query_positions =
      own_positions(call.query_positions, plan.queries, query_len, query_positions_);
  own_call_.key_positions = own_positions(call.key_positions, plan.keys, kv_len, key_positions_);
}

LatentContext::LatentContext(const Operation& operation, const Context& context,
                             const Communicator& communicator, const LatentAttention& layer,
                             const ContextSaved& saved)
    : context_(context),
      layer_(layer),
      rank_(communicator.rank()),
      steps_(context, layer),
      plan_(saved.plan),
      options_(saved.options) {
  make_whole(operation, communicator, saved.queries.size(0), saved.queries.size(1),
             saved.latents.size(1));
}

void LatentContext::attend_expanded(const Tensor& latents, AttendedHeads& own) const {
  for_each_expanded(latents, [&](const Range& heads, const Tensor& keys, const Tensor& values) {
    for_each_piece([&](const QueryPiece& piece) {
      attend(context_, ladon::rows_of(own.queries.view(), piece, heads),
             keys_of(piece, ConstTensorView(keys)), keys_of(piece, ConstTensorView(values)),
             whole_->options_of(piece, heads), ladon::rows_of(own.attended.view(), piece, heads),
             lse_of(present(own.lse), piece, heads), whole_->whole_of(piece));
    });
  });
}

void LatentContext::attend_absorbed(const Tensor& latents, AttendedHeads& own) const {
  const DType dtype = steps_.absorbed_dtype(latents.dtype());
  const Dims& shape = own.queries.shape();
  Tensor absorbed = Tensor::uninitialized(context_, steps_.compute_dtype(),
                                          {shape[0], shape[1], shape[2], layer_.latent_dim()});
  steps_.absorb_queries(merged(std::as_const(own.queries)), merged(absorbed));
  if (dtype != absorbed.dtype()) absorbed = Tensor::copy_of(context_, absorbed, dtype);
  Tensor sums =
      Tensor::uninitialized(context_, dtype, {shape[0], shape[1], shape[2], layer_.kv_rank()});
  const ConstTensorView all = one_head(latents);
  const Range heads{0, layer_.num_heads()};
  for_each_piece([&](const QueryPiece& piece) {
    const ConstTensorView keys = keys_of(piece, all);
    WholeProblem problem = whole_->whole_of(piece);
    problem.group = layer_.num_heads();
    attend(context_, ladon::rows_of(absorbed.view(), piece, heads), keys,
           keys.slice(3, 0, layer_.kv_rank()), whole_->options_of(piece, heads),
           ladon::rows_of(sums.view(), piece, heads), {}, problem);
  });
  steps_.apply_values(merged(std::as_const(sums)), merged(own.attended));
  context_.synchronize();
}

void LatentContext::check_call(const Operation& operation, const LayerInputs& inputs,
                               const ContextPlan& plan, const LayerCall& call) {
  const LatentAttentionOptions& options = layer_.options();
  if (!call.weights.absent()) {
    fail(ErrorCode::kUnsupported, operation, "weights",
         "got a tensor, expected none: each rank has the weights of its own queries alone");
  }
  if (plan.scheme != ContextScheme::kAuto && plan.scheme != ContextScheme::kAllGather) {
    fail(ErrorCode::kUnsupported, operation, "plan.scheme",
         "got " + std::to_string(static_cast<int>(plan.scheme)) +
             ", expected kAllGather or kAuto: latents are gathered");
  }
  if (!inputs.value.absent()) {
    fail(ErrorCode::kUnsupported, operation, "value",
         got_shape(inputs.value) + ", expected none: values come from the latents of key");
  }
  inputs_.query =
      check_tokens(operation, {"query", inputs.query}, options.dtype, options.embed_dim);
  inputs_.self = inputs.key.absent();
  inputs_.key = inputs_.query;
  if (inputs_.self && plan.keys != plan.queries) {
    fail(operation, "plan.keys", "got other ranges than plan.queries, expected the same");
  }
  if (inputs_.self) return;
  inputs_.key = check_tokens(operation, {"key", inputs.key}, options.dtype, options.embed_dim);
  if (inputs.key.rank() != inputs.query.rank() || inputs_.key.size(0) != inputs_.query.size(0)) {
    fail(operation, "key",
         got_shape(inputs.key) + ", expected a batch as in query's " +
             inputs.query.shape().to_string());
  }
}

void LatentContext::make_whole(const Operation& operation, const Communicator& communicator,
                               std::int64_t batch, std::int64_t own_queries,
                               std::int64_t own_keys) {
  // Memory of the device, or the checks would refuse views of it.
  described_ = Tensor::uninitialized(context_, layer_.dtype(),
                                     {std::max(layer_.head_dim(), layer_.value_dim())});
  const auto described = [&](std::int64_t tokens, std::int64_t dim) {
    return ConstTensorView(described_.data(), layer_.dtype(),
                           {batch, tokens, layer_.num_heads(), dim}, {0, 0, 0, 1}, layer_.device());
  };
  q_ = described(own_queries, layer_.head_dim());
  k_ = described(own_keys, layer_.head_dim());
  v_ = described(own_keys, layer_.value_dim());
  whole_.emplace(operation, communicator, q_, k_, v_, options_, plan_);
}

RopePositions LatentContext::own_positions(const RopePositions& all,
                                           const std::vector<std::vector<TokenRange>>& ranges,
                                           std::int64_t length,
                                           std::vector<std::int64_t>& memory) const {
  const auto listed = static_cast<std::int64_t>(all.explicit_positions.size());
  const std::int64_t sequences = listed > length ? listed / length : 1;
  for (std::int64_t s = 0; s < sequences; ++s) {
    for (const TokenRange& range : ranges[static_cast<std::size_t>(rank_)]) {
      for (std::int64_t token = range.begin; token < range.end; ++token) {
        memory.push_back(
            listed == 0 ? all.first + token
                        : all.explicit_positions[static_cast<std::size_t>(s * length + token)]);
      }
    }
  }
  return {.explicit_positions = memory};
}

}  // namespace ladon::latent
