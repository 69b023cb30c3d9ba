// attention_weights(): checks, then the backend.

#include <string>

#include "attention/call.h"
#include "attention/validate.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "ladon/attention.h"

namespace ladon {

void attention_weights(const Context& context, const ConstTensorView& q, const ConstTensorView& k,
                       const AttentionOptions& options, const TensorView& weights,
                       ScoreStage stage) {
  const Operation operation("attention_weights", context);
  const AttentionSizes sizes = check_inputs(operation, q, k, {}, options);
  if (sizes.packed) {
    fail(ErrorCode::kUnsupported, operation, "query_offsets",
         "got a packed batch, expected one sequence at a time or a padded batch");
  }
  if (stage > ScoreStage::kDropped) {
    fail(operation, "stage",
         "got " + std::to_string(static_cast<int>(stage)) + ", expected a ScoreStage");
  }
  const NamedView output{"weights", weights};
  check_strided_floats(operation, output,
                       {sizes.batch, sizes.num_heads, sizes.query_len, sizes.kv_len});
  const NamedView inputs[] = {{"q", q},
                              {"k", k},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(operation, {&output, 1}, inputs);

  const AttentionCall call(context, sizes, q, k, {}, options);
  WeightsOperand operand{weights.data(), weights.dtype()};
  for (int dim = 0; dim < 4; ++dim) operand.strides[dim] = weights.stride(dim);
  backend_of(context).attention_weights(call.params(), stage, operand);
}

}  // namespace ladon
