// The dtype in which operations compute.
#pragma once

#include "ladon/dtype.h"

namespace ladon {

/// The dtype of sums, gradients, logsumexps and optimiser states next to elements of this dtype:
/// f64 for f64, else f32.
constexpr DType compute_dtype(DType dtype) noexcept {
  return dtype == DType::kF64 ? DType::kF64 : DType::kF32;
}

}  // namespace ladon
