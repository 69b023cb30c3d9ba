// Do two strided views share memory?
#pragma once

#include "ladon/tensor_view.h"

namespace ladon {

/// True when some byte belongs to both. Exact for interleaved views such as the three parts of a
/// packed QKV buffer; for shapes whose search would take too long it answers true.
bool overlaps(const ConstTensorView& a, const ConstTensorView& b);

/// True when two different indices of the view reach one byte (a stride of 0, say).
bool overlaps_itself(const ConstTensorView& view);

}  // namespace ladon
