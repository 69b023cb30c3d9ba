#include "layers/layer_call.h"

#include <string>

#include "attention/validate.h"
#include "core/fail.h"
#include "layers/rope_internal.h"
#include "layers/rows.h"

namespace ladon {

void check_layer_call(const Operation& operation, const LayerCall& call,
                      const LayerCallSizes& sizes) {
  check_mask_and_bias(operation, call.mask, call.bias,
                      {.num_sequences = sizes.batch,
                       .max_query_len = sizes.query_len,
                       .max_kv_len = sizes.kv_len,
                       .num_heads = sizes.num_heads});
  check_kv_lengths(operation, call.kv_lengths, sizes.batch, sizes.kv_len);
  if (sizes.rope) {
    rope_internal::check_positions(operation, "query_positions", call.query_positions, sizes.batch,
                                   sizes.query_len);
    rope_internal::check_positions(operation, "key_positions", call.key_positions, sizes.batch,
                                   sizes.kv_len);
  }
  if (call.weights.absent()) return;
  const NamedView weights{"weights", call.weights};
  check_strided_floats(operation, weights,
                       {sizes.batch, sizes.num_heads, sizes.query_len, sizes.kv_len});
  check_no_self_overlap(operation, weights);
  check_apart(operation, weights, {"mask", call.mask});
  check_apart(operation, weights, {"bias", call.bias});
}

ConstTensorView check_tokens(const Operation& operation, const NamedView& argument, DType dtype,
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

}  // namespace ladon
