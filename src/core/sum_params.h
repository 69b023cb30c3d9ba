// Sums over heads and arrays, as every backend sees them: plain data.
#pragma once

#include <cstdint>

#include "core/projection_params.h"

namespace ladon {

/// y[row][g][i] = sum over the `group` heads h of group g of x[row][g * group + h][i]. Rows are
/// Matrix rows; heads are `head_stride` elements apart within them.
struct HeadSumParams {
  std::int64_t rows = 0;
  std::int64_t groups = 1;
  std::int64_t group = 1;
  std::int64_t dim = 0;
  Matrix x{};
  std::int64_t x_head_stride = 0;
  Matrix y{};
  std::int64_t y_head_stride = 0;
};

/// f32 or f64 elements, contiguous.
struct FloatArray {
  void* data = nullptr;
  DType dtype = DType::kF32;
  std::int64_t count = 0;
};

/// to += from; same dtype and count.
struct AccumulateParams {
  FloatArray from{};
  FloatArray to{};
};

}  // namespace ladon
