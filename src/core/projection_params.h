// One projection y = x W^T + b, or one of its gradients, as every backend sees it: plain data.
#pragma once

#include <cstdint>

#include "ladon/dtype.h"

namespace ladon {

/// Rows of numbers; each row is dense. Strides in elements.
struct Matrix {
  void* data = nullptr;  // null where it is absent
  DType dtype = DType::kF32;
  std::int64_t stride = 0;
};

/// x [rows, in_features], w [out_features, in_features], b [out_features], y [rows, out_features].
/// Gradients dx and dw are of the compute type and are added to.
struct ProjectionParams {
  std::int64_t rows = 0;
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  Matrix x{};
  Matrix w{};
  Matrix b{};  // one row
  Matrix y{};  // y, or its gradient
  Matrix dx{};
  Matrix dw{};
  Matrix db{};  // one row
};

}  // namespace ladon
