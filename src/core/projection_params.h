// One projection y = x W^T + b, or one of its gradients, as every backend sees it: plain data.
#pragma once

#include <cstdint>

#include "ladon/dtype.h"

namespace ladon {

/// Rows of elements; each row is contiguous. Strides in elements.
struct Matrix {
  void* data = nullptr;  // null where it is absent
  DType dtype = DType::kF32;
  std::int64_t stride = 0;
};

/// The same projection for several heads at once, each with its own weights: matrices are those of
/// the first head, and the next one's start this many elements further on.
struct HeadSteps {
  std::int64_t heads = 1;
  std::int64_t x = 0;  // x or dx
  std::int64_t w = 0;
  std::int64_t y = 0;  // y or dy
};

/// x [rows, in_features], w [out_features, in_features], b [out_features], y [rows, out_features].
/// Gradients dx, dw and db are f64 where the operands are, else f32, and are added to.
struct ProjectionParams {
  std::int64_t rows = 0;
  std::int64_t in_features = 0;
  std::int64_t out_features = 0;
  HeadSteps steps{};
  Matrix x{};
  Matrix w{};
  Matrix b{};  // one row
  Matrix y{};  // y, or its gradient
  Matrix dx{};
  Matrix dw{};
  Matrix db{};  // one row
};

}  // namespace ladon
