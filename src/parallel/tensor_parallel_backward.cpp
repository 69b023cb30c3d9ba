// Backward of TensorParallelAttention. Each rank has the gradient of all outputs; what it computes
// from its rows of the output projection is a term of the gradients of all attended values, and
// what it computes from its heads a term of the gradients of the inputs.

#include <optional>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "layers/multi_head_backward.h"
#include "layers/projection.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "TensorParallelAttention::backward";

/// Sums the gradients of parameters that several ranks have: norms, and KV heads where ranks
/// outnumber them.
void sum_shared_parameters(const Context& context, CollectiveCall& call,
                           const TensorParallelAttention& layer, const LayerHeads& heads,
                           PendingGradients& pending) {
  sum_over_ranks(context, call, pending.of(heads.plan.query_norm), 0, call.size());
  sum_over_ranks(context, call, pending.of(heads.plan.key_norm), 0, call.size());
  const auto replicas =
      static_cast<int>(std::max<std::int64_t>(1, call.size() / layer.num_kv_heads()));
  if (replicas == 1) return;
  const int first = call.rank() / replicas * replicas;
  for (const LinearIndex& linear : {heads.plan.key, heads.plan.value}) {
    for (const int index : {linear.weight, linear.bias}) {
      sum_over_ranks(context, call, pending.of(index), first, first + replicas);
    }
  }
}

}  // namespace

InputGradients TensorParallelAttention::backward(const Context& context,
                                                 const ConstTensorView& grad_out,
                                                 const SavedForward& saved) {
  const Operation operation(kOperation, context);
  const LayerHeads heads(*this, own_, *plan_, alibi_slopes_, first_head_,
                         whole_.num_heads / whole_.num_kv_heads);
  const TensorParallelSaved* state = nullptr;
  std::optional<HeadsBackward> backward;
  InputGradients gradients;
  run_collective(
      communicator_, operation,
      [&](CallSignature& signature) {
        check_device(operation, "layer", device());
        state = static_cast<const TensorParallelSaved*>(
            &check_saved(operation, *this, saved, identity_));
        check_device(operation, "saved", state->query.device());
        const std::int64_t batch = state->query.size(0);
        const std::int64_t length = state->query.size(1);
        check_tensor(operation, {"grad_out", grad_out}, whole_.dtype,
                     state->batched ? Dims{batch, length, whole_.embed_dim}
                                    : Dims{length, whole_.embed_dim});
        describe_layer(context, *this, signature);
        signature.add("grad_out", grad_out);
        signature.add("one_position", std::int64_t{state->one_position});
      },
      [&](CollectiveCall& call) {
        backward.emplace(context, *this, heads, *state);
        const DType sums = compute_dtype(whole_.dtype);
        const Share rows = share_of(whole_.embed_dim, call.rank(), call.size());
        const InputRows all_dout(context, with_batch(grad_out));
        const ConstTensorView dout = all_dout.view().slice(1, rows.begin, rows.end);
        Tensor terms(context, sums, state->all_attended.shape());
        add_input_gradient(context, dout, weight_of(*this, plan_->out.weight), terms);
        add_weight_gradient(context, state->all_attended, dout,
                            backward->pending().of(plan_->out.weight),
                            backward->pending().of(plan_->out.bias));
        const Tensor own = reduce_columns(context, call, terms);
        Tensor dattended = Tensor::uninitialized(context, whole_.dtype, state->attended.shape());
        copy(context, own.view().reshape(dattended.shape()), dattended);
        backward->run(dattended);
        for (Tensor* sum :
             {&backward->sums().query, &backward->sums().key, &backward->sums().value}) {
          if (sum->rank() != 0) sum_over_ranks(context, call, *sum, 0, call.size());
        }
        sum_shared_parameters(context, call, *this, heads, backward->pending());
        gradients = backward->finished();
        context.synchronize();
      },
      [&] { backward->pending().commit(); });
  return gradients;
}

}  // namespace ladon
