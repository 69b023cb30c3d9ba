// What the calls of both tensor-parallel layers have in common: their output projection, forward
// and backward, and what ranks agree on.

#include "core/compute_dtype.h"
#include "core/fail.h"
#include "layers/projection.h"
#include "parallel/tensor_parallel.h"

namespace ladon {
namespace {

void describe_positions(CallSignature& signature, std::string_view name,
                        const RopePositions& positions) {
  signature.add(std::string(name) + ".first", positions.first);
  signature.add(name, positions.explicit_positions);
}

}  // namespace

void describe_call(CallSignature& signature, const LayerCall& call, bool layer_is_causal) {
  signature.add("causal", std::int64_t{call.causal.value_or(layer_is_causal)});
  signature.add("mask", call.mask);
  signature.add("bias", call.bias);
  signature.add("kv_lengths", call.kv_lengths);
  signature.add("dropout_seed", std::to_string(call.dropout_seed));
  describe_positions(signature, "query_positions", call.query_positions);
  describe_positions(signature, "key_positions", call.key_positions);
}

void describe_call(CallSignature& signature, const ConstTensorView& x, const CachedTokens& tokens,
                   const CachedCall& call, bool layer_is_causal) {
  signature.add("x", x);
  signature.add("causal", std::int64_t{call.causal.value_or(layer_is_causal)});
  signature.add("new_lengths", call.new_lengths);
  signature.add("query", call.query);
  signature.add("query_positions", call.query_positions);
  signature.add("mask", call.mask);
  signature.add("bias", call.bias);
  signature.add("cache lengths", tokens.past);
}

void check_no_weights(const Operation& operation, const LayerCall& call) {
  if (call.weights.absent()) return;
  fail(ErrorCode::kUnsupported, operation, "weights",
       "got a tensor, expected none: each rank has the weights of its own heads alone");
}

Tensor project_out(const Context& context, CollectiveCall& call, const TensorParallelLayer& layer,
                   const LinearIndex& out, const ConstTensorView& all_attended) {
  const ConstTensorView weight = weight_of(layer, out.weight);
  Tensor y = Tensor::uninitialized(context, layer.dtype(), {all_attended.size(0), weight.size(0)});
  project(context, all_attended, weight, weight_of(layer, out.bias), y);
  return gather_columns(context, call, y, layer.embed_dim());
}

Tensor with_shape(const Context& context, const Tensor& rows, const Dims& shape) {
  return Tensor::copy_of(context, rows.view().reshape(shape));
}

Tensor project_out_backward(const Context& context, CollectiveCall& call,
                            const TensorParallelLayer& layer, const OutputGradient& of,
                            PendingGradients& pending) {
  const auto& [out, all_attended, grad_out, own_shape] = of;
  const Range rows = share_of(layer.embed_dim(), call.rank(), call.size());
  const InputRows all_dout(context, with_batch(grad_out));
  const ConstTensorView dout = all_dout.view().slice(1, rows.begin, rows.end);
  Tensor terms = Tensor::uninitialized(context, compute_dtype(layer.dtype()), all_attended.shape());
  const GradientTerm term{dout, weight_of(layer, out.weight)};
  sum_input_gradients(context, {&term, 1}, terms);
  add_weight_gradient(context, all_attended, dout, pending.of(out.weight), pending.of(out.bias));
  const Tensor own = reduce_columns(context, call, terms);
  Tensor dattended = Tensor::uninitialized(context, layer.dtype(), own_shape);
  copy(context, own.view().reshape(own_shape), dattended);
  context.synchronize();
  return dattended;
}

}  // namespace ladon
