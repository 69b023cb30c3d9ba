// Elements of any dtype and strides, copied and filled in host memory: for the CPU's backends, and
// for code that has no Context (files, the construction of layers).
#pragma once

#include "core/random_params.h"
#include "core/workers.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// Checked views of the same shape that do not overlap. Without workers, on the caller's thread.
void copy_on_host(const Workers* workers, const ConstTensorView& from, const TensorView& to);
/// A contiguous copy in host memory.
Tensor host_copy_of(const ConstTensorView& view, DType dtype);
void fill_on_host(const Workers* workers, const RandomFillParams& params);

}  // namespace ladon
