// Parameter: zeros and copies.
#include "ladon/parameter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>

#include "core/element.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;

TEST(Parameter, ZerosHaveAGradientInThePrecisionOfSums) {
  const std::pair<DType, DType> dtypes[] = {{DType::kF64, DType::kF64},
                                            {DType::kF32, DType::kF32},
                                            {DType::kF16, DType::kF32},
                                            {DType::kBF16, DType::kF32}};
  for (const auto& [dtype, gradient_dtype] : dtypes) {
    const Parameter parameter = Parameter::zeros("q_proj.weight", dtype, {3, 5});
    EXPECT_EQ(parameter.name, "q_proj.weight");
    EXPECT_EQ(parameter.value.dtype(), dtype);
    EXPECT_EQ(parameter.gradient.dtype(), gradient_dtype);
    EXPECT_EQ(parameter.value.shape(), (Dims{3, 5}));
    EXPECT_EQ(parameter.gradient.shape(), (Dims{3, 5}));
    EXPECT_EQ(parameter.num_elements(), 15);
    for (std::int64_t i = 0; i < 15; ++i) {
      EXPECT_EQ(load_element(parameter.value.data(), dtype, i), 0);
      EXPECT_EQ(load_element(parameter.gradient.data(), gradient_dtype, i), 0);
    }
  }
}

TEST(Parameter, MayBeAScalarOrEmpty) {
  EXPECT_EQ(Parameter::zeros("scale", DType::kF32, {}).num_elements(), 1);
  EXPECT_EQ(Parameter::zeros("none", DType::kF32, {0, 4}).num_elements(), 0);
  EXPECT_EQ(Parameter{}.num_elements(), 0);
}

TEST(Parameter, CopiesAreDeep) {
  Parameter original = Parameter::zeros("w", DType::kBF16, {2});
  original.value = Tensor::from_values(DType::kBF16, {2}, {1, 2});
  original.gradient = Tensor::from_values(DType::kF32, {2}, {3, 4});
  const Parameter copy = original.copy();
  store_element(original.value.data(), DType::kBF16, 0, 10);
  original.gradient.data_as<float>()[0] = 30;
  EXPECT_EQ(copy.name, "w");
  EXPECT_EQ(static_cast<float>(copy.value.data_as<bfloat16>()[0]), 1.0F);
  EXPECT_EQ(static_cast<float>(copy.value.data_as<bfloat16>()[1]), 2.0F);
  EXPECT_EQ(copy.gradient.data_as<float>()[0], 3.0F);
  EXPECT_EQ(copy.gradient.data_as<float>()[1], 4.0F);
}

TEST(Parameter, CopiesWhatIsThere) {
  Parameter original = Parameter::zeros("w", DType::kF32, {2, 0});
  original.gradient = Tensor();
  const Parameter copy = original.copy();
  EXPECT_EQ(copy.value.shape(), (Dims{2, 0}));
  EXPECT_TRUE(copy.gradient.view().absent());
  const Parameter nothing = Parameter{}.copy();
  EXPECT_TRUE(nothing.value.view().absent());
}

TEST(Parameter, RefusesBoolsAndImpossibleShapes) {
  EXPECT_EQ(error_of([] { Parameter::zeros("w", DType::kBool, {2}); }),
            "Parameter::zeros: dtype: got bool, expected f64, f32, f16 or bf16");
  EXPECT_EQ(error_of([] {
              Parameter::zeros("w", DType::kF32, {2, -1});
            }),
            "Parameter::zeros: shape: got [2, -1], expected no negative size");
  constexpr std::int64_t kMax = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(error_of([] { Parameter::zeros("w", DType::kF32, {kMax}); }, ErrorCode::kOutOfMemory),
            "Tensor: shape: got [9223372036854775807] of f32, expected a size that fits the "
            "address space");
}

TEST(Parameter, GradientsComeWhenTheyAreAskedFor) {
  Parameter parameter = Parameter::zeros_without_gradient("w", DType::kBF16, {2, 3});
  EXPECT_TRUE(parameter.gradient.view().absent());
  parameter.zero_gradient(host_context());  // nothing to clear
  parameter.make_gradient(host_context());
  EXPECT_EQ(parameter.gradient.dtype(), DType::kF32);
  EXPECT_EQ(parameter.gradient.shape(), (Dims{2, 3}));
  parameter.gradient.data_as<float>()[5] = 7;
  parameter.make_gradient(host_context());  // the one that is there stays
  EXPECT_EQ(parameter.gradient.data_as<float>()[5], 7.0F);
  parameter.zero_gradient(host_context());
  EXPECT_EQ(parameter.gradient.data_as<float>()[5], 0.0F);
}

}  // namespace
}  // namespace ladon
