#pragma once

#include "ladon/convert.h"
#include "ladon/tensor.h"

namespace ladon {

/// Sums over tokens, on the host in f64.
class Calibration::Impl {
 public:
  explicit Impl(std::int64_t width);

  Tensor products;  // of x x^T: [width, width]
  Tensor sums;      // of x: [width]
  std::int64_t tokens = 0;
  std::int64_t longest = 0;
};

}  // namespace ladon
