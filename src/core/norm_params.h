// RMS norm over rows, y = x * (weight + weight_offset) / sqrt(mean(x^2) + epsilon), and its
// backward: plain data. Layer norm is the same of x less its mean.
#pragma once

#include <cstdint>

#include "core/projection_params.h"

namespace ladon {

/// x, y, dy and dx are [rows, dim]; y may be x, and dx may be dy.
struct NormParams {
  std::int64_t rows = 0;
  std::int64_t dim = 0;
  double epsilon = 0;
  double weight_offset = 0;
  bool centered = false;  // layer norm
  Matrix x{};
  /// Row r of x has row r % weight_rows of it, of which `rows` is a multiple.
  Matrix weight{};
  std::int64_t weight_rows = 1;
  Matrix y{};
  // Backward only.
  Matrix dy{};
  Matrix dx{};
  Matrix dweight{};  // as weight; f64 where x is, else f32; added to
};

}  // namespace ladon
