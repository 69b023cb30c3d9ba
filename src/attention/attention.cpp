// attention(): checks, then the backend.

#include "ladon/attention.h"

#include "attention/attend.h"
#include "attention/call.h"
#include "attention/validate.h"
#include "core/context_impl.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "attention";

struct CheckedInputs {
  const ConstTensorView& q;
  const ConstTensorView& k;
  const ConstTensorView& v;
  const AttentionOptions& options;
};

/// Checks the outputs, and that they share memory with none of the inputs.
void check_outputs(const Operation& operation, const AttentionSizes& sizes,
                   const CheckedInputs& given, const TensorView& out, const TensorView& lse) {
  const AttentionOptions& options = given.options;
  check_result(operation, {"out", out}, given.q.dtype(),
               {sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim});
  if (!lse.absent()) check_lse(operation, {"lse", lse}, sizes, given.q.dtype());
  const NamedView outputs[] = {{"out", out}, {"lse", lse}};
  const NamedView inputs[] = {{"q", given.q},          {"k", given.k},
                              {"v", given.v},          {"mask", options.mask},
                              {"bias", options.bias},  {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(operation, outputs, inputs);
}

void run(const Context& context, AttentionCall& call, const TensorView& out,
         const TensorView& lse) {
  if (out.num_elements() == 0) return;  // however many heads or sequences have no queries
  call.set_out(out);
  call.set_lse(lse);
  backend_of(context).attend(call.params());
}

}  // namespace

void attend(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
            const ConstTensorView& v, const AttentionOptions& options, const TensorView& out,
            const TensorView& lse, const WholeProblem& whole) {
  AttentionCall call(context, sizes_of_inputs(q, k, v, options), q, k, v, options);
  call.set_whole(whole);
  run(context, call, out, lse);
}

void attend(const Context& context, const ConstTensorView& q, const KvCacheView& cache,
            const AttentionOptions& options, const TensorView& out, const TensorView& lse,
            const WholeProblem& whole) {
  AttentionCall call(context, sizes_of_cache_inputs(q, cache, options), q, cache, options);
  call.set_whole(whole);
  run(context, call, out, lse);
}

void attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
               const ConstTensorView& v, const AttentionOptions& options, const TensorView& out,
               const TensorView& lse) {
  const Operation operation(kOperation, context);
  check_present(operation, {"v", v});
  const AttentionSizes sizes = check_inputs(operation, q, k, v, options);
  check_outputs(operation, sizes, {.q = q, .k = k, .v = v, .options = options}, out, lse);
  AttentionCall call(context, sizes, q, k, v, options);
  run(context, call, out, lse);
}

void attention(const Context& context, const ConstTensorView& q, const KvCacheView& cache,
               const AttentionOptions& options, const TensorView& out, const TensorView& lse) {
  const Operation operation(kOperation, context);
  const AttentionSizes sizes = check_cache_inputs(operation, q, cache, options);
  check_outputs(operation, sizes,
                {.q = q, .k = cache_keys(cache), .v = cache_values(cache), .options = options}, out,
                lse);
  AttentionCall call(context, sizes, q, cache, options);
  run(context, call, out, lse);
}

Tensor attention(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                 const ConstTensorView& v, const AttentionOptions& options) {
  const Operation operation(kOperation, context);
  check_present(operation, {"v", v});
  const AttentionSizes sizes = check_inputs(operation, q, k, v, options);
  Tensor out = Tensor::uninitialized(
      context, q.dtype(), {sizes.batch, sizes.query_len, sizes.num_heads, sizes.value_dim});
  AttentionCall call(context, sizes, q, k, v, options);
  run(context, call, out, {});
  return out;
}

}  // namespace ladon
