// Tensors compared with the truth.
#pragma once

#include "ladon/tensor_view.h"

namespace ladon::bench {

/// max |got - truth| / max |truth|, over all elements; the difference itself where truth is all 0.
/// Infinity where either has a number that is not finite. Shapes must agree; dtypes need not.
double largest_error(const ConstTensorView& got, const ConstTensorView& truth);

/// True when shape, dtype and every bit agree. Both must be contiguous.
bool same_bits(const ConstTensorView& a, const ConstTensorView& b);

}  // namespace ladon::bench
