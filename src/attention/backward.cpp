// attention_backward(): checks, then the backend.

#include "attention/attend.h"
#include "attention/call.h"
#include "attention/validate.h"
#include "core/context_impl.h"
#include "ladon/attention.h"

namespace ladon {
namespace {

void check_like(const Operation& operation, const NamedView& argument,
                const ConstTensorView& input) {
  if (argument.view.absent()) return;
  check_result(operation, argument, input.dtype(), input.shape());
}

}  // namespace

void attend_backward(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                     const ConstTensorView& v, const AttentionOptions& options,
                     const AttentionSaved& saved, const AttentionGradients& gradients) {
  AttentionCall call(context, sizes_of_inputs(q, k, v, options), q, k, v, options);
  call.set_saved(saved);
  call.set_gradients(gradients);
  backend_of(context).attend_backward(call.params());
}

void attention_backward(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                        const ConstTensorView& v, const AttentionOptions& options,
                        const AttentionSaved& saved, const AttentionGradients& gradients) {
  const Operation operation("attention_backward", context);
  check_present(operation, {"v", v});
  const AttentionSizes sizes = check_inputs(operation, q, k, v, options);
  const Dims out_shape{sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim};
  for (const NamedView& argument : {NamedView{"out", saved.out}, NamedView{"dout", saved.dout}}) {
    check_tensor(operation, argument, q.dtype(), out_shape);
  }
  check_lse(operation, {"lse", saved.lse}, sizes, q.dtype());
  if (!saved.dlse.absent()) check_lse(operation, {"dlse", saved.dlse}, sizes, q.dtype());
  check_like(operation, {"dq", gradients.dq}, q);
  check_like(operation, {"dk", gradients.dk}, k);
  check_like(operation, {"dv", gradients.dv}, v);
  check_side_gradient(operation, {"dbias", gradients.dbias}, {"bias", options.bias});
  check_side_gradient(operation, {"dsinks", gradients.dsinks}, {"sinks", options.sinks});
  const NamedView outputs[] = {{"dq", gradients.dq},
                               {"dk", gradients.dk},
                               {"dv", gradients.dv},
                               {"dbias", gradients.dbias},
                               {"dsinks", gradients.dsinks}};
  const NamedView inputs[] = {{"q", q},
                              {"k", k},
                              {"v", v},
                              {"out", saved.out},
                              {"lse", saved.lse},
                              {"dout", saved.dout},
                              {"dlse", saved.dlse},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(operation, outputs, inputs);

  AttentionCall call(context, sizes, q, k, v, options);
  call.set_saved(saved);
  call.set_gradients(gradients);
  backend_of(context).attend_backward(call.params());
}

}  // namespace ladon
