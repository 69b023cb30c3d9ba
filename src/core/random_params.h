// Random elements of a view, as every backend sees them: plain data.
#pragma once

#include <cstdint>

#include "ladon/tensor_view.h"

namespace ladon {

/// Element i of the view, in row-major order, from Philox's words for (seed, stream, i).
struct RandomFillParams {
  enum class Kind : std::uint8_t {
    kUniform,  // a + (b - a) * uniform
    kNormal,   // mean a, deviation b
  };
  TensorView view{};
  Kind kind = Kind::kUniform;
  double a = 0;
  double b = 0;
  std::uint64_t seed = 0;
  std::uint64_t stream = 0;
};

}  // namespace ladon
