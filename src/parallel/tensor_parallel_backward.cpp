// Backward of TensorParallelAttention. Each rank has the gradient of all outputs; what it computes
// from its rows of the output projection is a term of the gradients of all attended values, and
// what it computes from its heads a term of the gradients of the inputs.

#include <optional>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "layers/multi_head_backward.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "TensorParallelAttention::backward";

}  // namespace

void TensorParallelAttention::run_backward(const Context& context, const ConstTensorView& grad_out,
                                           const SavedForward& saved,
                                           InputGradientOutputs& gradients) {
  const Operation operation(kOperation, context);
  const LayerHeads heads = own_heads();
  const TensorParallelSaved<Saved>* state = nullptr;
  std::optional<HeadsBackward> backward;
  InputGradientOutputs terms;  // of the heads that are here
  InputGradients results;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        state = &check_backward<TensorParallelSaved<Saved>>(operation, *this, saved, identity_,
                                                            grad_out, gradients);
        describe(context, signature);
        signature.add("grad_out", grad_out);
        signature.add("one_position", std::int64_t{state->one_position});
        signature.add("gradients", gradients.wanted());
      },
      [&](CollectiveCall& call) {
        terms = gradients.staged();
        backward.emplace(context, *this, heads, *state, compute_dtype(dtype()), terms);
        const Tensor dattended = project_out_backward(context, call, *this,
                                                      {.out = plan_->out,
                                                       .all_attended = state->all_attended,
                                                       .grad_out = grad_out,
                                                       .own_shape = state->attended.shape()},
                                                      backward->pending());
        backward->run(dattended);
        const auto sum_up = [&](Tensor&& sum) {
          if (sum.rank() == 0) return Tensor();
          sum_over_ranks(context, call, sum, 0, call.size());
          return Tensor::copy_of(context, sum, dtype());
        };
        results = {sum_up(terms.query.take()), sum_up(terms.key.take()),
                   sum_up(terms.value.take())};
        sum_shared_gradients(context, call, *this, backward->pending());
        context.synchronize();
      },
      [&] {
        gradients.publish(context, std::move(results));
        backward->pending().commit();
        context.synchronize();
      });
}

}  // namespace ladon
