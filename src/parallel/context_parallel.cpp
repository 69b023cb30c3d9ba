// context_parallel_attention() and its backward: checks, the scheme, and the results.

#include "ladon/context_parallel.h"

#include <string>

#include "attention/validate.h"
#include "core/checks.h"
#include "core/compute_dtype.h"
#include "parallel/collective_call.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"
#include "parallel/whole_attention.h"

namespace ladon {
namespace {

std::vector<NamedView> named_inputs(const ContextCall& own) {
  const AttentionOptions& options = own.whole.options();
  return {{"q", own.q},
          {"k", own.k},
          {"v", own.v},
          {"out", own.saved.out},
          {"lse", own.saved.lse},
          {"dout", own.saved.dout},
          {"dlse", own.saved.dlse},
          {"mask", options.mask},
          {"bias", options.bias},
          {"alibi_slopes", options.alibi_slopes},
          {"sinks", options.sinks}};
}

/// The sizes of a rank's own part.
AttentionSizes own_sizes(const ContextCall& own) {
  AttentionSizes sizes = own.whole.sizes();
  sizes.query_len = own.q.size(1);
  sizes.kv_len = own.k.size(1);
  return sizes;
}

Tensor memory_for(const Context& context, const TensorView& result) {
  if (result.absent()) return {};
  return Tensor::uninitialized(context, result.dtype(), result.shape());
}

void check_backward(const Operation& operation, const ContextCall& own) {
  const AttentionSizes sizes = own_sizes(own);
  const Dims out_shape{sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim};
  check_tensor(operation, {"out", own.saved.out}, own.q.dtype(), out_shape);
  check_tensor(operation, {"dout", own.saved.dout}, own.q.dtype(), out_shape);
  check_lse(operation, {"lse", own.saved.lse}, sizes, own.q.dtype());
  if (!own.saved.dlse.absent()) {
    check_lse(operation, {"dlse", own.saved.dlse}, sizes, own.q.dtype());
  }
  const auto check_like = [&](const NamedView& gradient, const ConstTensorView& input) {
    if (gradient.view.absent()) return;
    check_result(operation, gradient, input.dtype(), input.shape());
  };
  check_like({"dq", own.wanted.dq}, own.q);
  check_like({"dk", own.wanted.dk}, own.k);
  check_like({"dv", own.wanted.dv}, own.v);
  const AttentionOptions& options = own.whole.options();
  check_side_gradient(operation, {"dbias", own.wanted.dbias}, {"bias", options.bias});
  check_side_gradient(operation, {"dsinks", own.wanted.dsinks}, {"sinks", options.sinks});
  const NamedView outputs[] = {{"dq", own.wanted.dq},
                               {"dk", own.wanted.dk},
                               {"dv", own.wanted.dv},
                               {"dbias", own.wanted.dbias},
                               {"dsinks", own.wanted.dsinks}};
  check_no_overlap(operation, outputs, named_inputs(own));
}

/// In a signature: ranks must want the same.
void describe_wanted(CallSignature& signature, const AttentionGradients& wanted) {
  std::string list;
  for (const auto& [name, view] :
       {std::pair{"dq", wanted.dq}, std::pair{"dk", wanted.dk}, std::pair{"dv", wanted.dv},
        std::pair{"dbias", wanted.dbias}, std::pair{"dsinks", wanted.dsinks}}) {
    if (!view.absent()) list += std::string(name) + " " + name_of(view.dtype()) + " ";
  }
  signature.add("gradients", list);
}

}  // namespace

void context_parallel_attention(const Context& context, Communicator& communicator,
                                const ConstTensorView& q, const ConstTensorView& k,
                                const ConstTensorView& v, const AttentionOptions& options,
                                const ContextPlan& plan, const TensorView& out,
                                const TensorView& lse) {
  const Operation operation("context_parallel_attention", context);
  std::optional<WholeAttention> whole;
  ContextResults results;
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        whole.emplace(operation, communicator, q, k, v, options, plan);
        const ContextCall own{context, *whole, q, k, v};
        const AttentionSizes sizes = own_sizes(own);
        check_tensor(operation, {"out", out}, q.dtype(),
                     {sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim});
        if (!lse.absent()) check_lse(operation, {"lse", lse}, sizes, q.dtype());
        const NamedView outputs[] = {{"out", out}, {"lse", lse}};
        check_no_overlap(operation, outputs, named_inputs(own));
        whole->describe(context, signature);
        signature.add("lse", lse.absent() ? "none" : name_of(lse.dtype()));
      },
      [&](CollectiveCall& call) {
        const ContextCall own{context, *whole, q, k, v};
        results.out = memory_for(context, out);
        results.lse = memory_for(context, lse);
        functions_of(whole->scheme()).forward(own, call, results);
      },
      [&] {
        copy(context, results.out, out);
        if (!lse.absent()) copy(context, results.lse, lse);
        context.synchronize();
      });
}

void context_parallel_attention_backward(const Context& context, Communicator& communicator,
                                         const ConstTensorView& q, const ConstTensorView& k,
                                         const ConstTensorView& v, const AttentionOptions& options,
                                         const ContextPlan& plan, const AttentionSaved& saved,
                                         const AttentionGradients& gradients) {
  const Operation operation("context_parallel_attention_backward", context);
  std::optional<WholeAttention> whole;
  ContextGradients results;
  Tensor dbias, dsinks;  // of all ranks, on the host
  run_collective(
      communicator, operation,
      [&](CallSignature& signature) {
        whole.emplace(operation, communicator, q, k, v, options, plan);
        check_backward(operation, {context, *whole, q, k, v, saved, gradients});
        whole->describe(context, signature);
        signature.add("lse", name_of(saved.lse.dtype()));
        signature.add("dlse", saved.dlse.absent() ? "none" : name_of(saved.dlse.dtype()));
        describe_wanted(signature, gradients);
      },
      [&](CollectiveCall& call) {
        const ContextCall own{context, *whole, q, k, v, saved, gradients};
        results.dq = memory_for(context, gradients.dq);
        results.dk = memory_for(context, gradients.dk);
        results.dv = memory_for(context, gradients.dv);
        const DType sums = compute_dtype(q.dtype());
        if (!gradients.dbias.absent()) {
          results.dbias = Tensor(context, sums, gradients.dbias.shape());
        }
        if (!gradients.dsinks.absent()) {
          results.dsinks = Tensor(context, sums, gradients.dsinks.shape());
        }
        functions_of(whole->scheme()).backward(own, call, results);
        if (results.dbias.rank() != 0) dbias = all_reduce_sums(context, call, results.dbias);
        if (results.dsinks.rank() != 0) dsinks = all_reduce_sums(context, call, results.dsinks);
      },
      [&] {
        if (!gradients.dq.absent()) copy(context, results.dq, gradients.dq);
        if (!gradients.dk.absent()) copy(context, results.dk, gradients.dk);
        if (!gradients.dv.absent()) copy(context, results.dv, gradients.dv);
        if (!gradients.dbias.absent()) copy(context, dbias, gradients.dbias);
        if (!gradients.dsinks.absent()) copy(context, dsinks, gradients.dsinks);
        context.synchronize();
      });
}

}  // namespace ladon
