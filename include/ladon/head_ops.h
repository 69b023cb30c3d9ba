// Helpers for people who port code: heads split, merged and repeated as other libraries do it.
// attention() needs none of them: it reads shared KV heads in place.
#pragma once

#include <cstdint>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// [batch, seq, kv_heads, dim] -> [batch, seq, kv_heads * times, dim]: each head `times` times in a
/// row, as grouped-query attention pairs them. Copies a view with any strides.
LADON_API Tensor repeat_kv(const Context& context, const ConstTensorView& x, std::int64_t times);

/// [batch, seq, heads * dim] -> [batch, seq, heads, dim]: the same memory. The last stride must
/// be 1.
LADON_API ConstTensorView split_heads(const ConstTensorView& x, std::int64_t num_heads);
LADON_API TensorView split_heads(const TensorView& x, std::int64_t num_heads);
/// A Tensor converts to both views, so it needs its own overload.
inline TensorView split_heads(Tensor& x, std::int64_t num_heads) {
  return split_heads(x.view(), num_heads);
}

/// [batch, seq, heads, dim] -> [batch, seq, heads * dim]. Copies a view with any strides, such as
/// [batch, heads, seq, dim] seen through a transpose.
LADON_API Tensor merge_heads(const Context& context, const ConstTensorView& x);

}  // namespace ladon
