// What the rope tests share: tensors of the host's to run over, and errors.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "ladon/dtype.h"
#include "ladon/error.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/host_context.h"

namespace ladon {

inline constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
inline constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
inline constexpr RopeLayout kLayouts[] = {RopeLayout::kHalfSplit, RopeLayout::kInterleaved};

using test::host_context;

inline std::vector<double> values_of(const ConstTensorView& view) {
  const Tensor wide = Tensor::copy_of(host_context(), view, DType::kF64);
  return {wide.data_as<double>(), wide.data_as<double>() + wide.num_elements()};
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.dtype() == b.dtype() && a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(),
                     static_cast<std::size_t>(a.num_elements()) * size_of(a.dtype())) == 0;
}

inline Tensor normal_tensor(DType dtype, const Dims& shape, std::uint64_t seed) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, 1, seed);
  return tensor;
}

/// Runs the call and compares the whole message.
inline void expect_error(const std::function<void()>& call, const std::string& message,
                         ErrorCode code = ErrorCode::kInvalidArgument) {
  try {
    call();
    ADD_FAILURE() << "no error, expected: " << message;
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), message);
    EXPECT_EQ(error.code(), code);
  }
}

}  // namespace ladon
