// Parameter: zeros and copies.
#include "ladon/parameter.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::elements_of;
using test::error_of;
using Elements = std::vector<double>;

class ParameterTest : public test::ContextTest {
 protected:
  /// Zeros, in the place.
  Parameter zeros(const char* name, DType dtype, const Dims& shape) const {
    return Parameter::zeros(name, dtype, shape).to(context_);
  }
};
LADON_FOR_EACH_CONTEXT(ParameterTest);

TEST_P(ParameterTest, ZerosHaveAGradientInThePrecisionOfSums) {
  const std::pair<DType, DType> dtypes[] = {{DType::kF64, DType::kF64},
                                            {DType::kF32, DType::kF32},
                                            {DType::kF16, DType::kF32},
                                            {DType::kBF16, DType::kF32}};
  for (const auto& [dtype, gradient_dtype] : dtypes) {
    const Parameter parameter = zeros("q_proj.weight", dtype, {3, 5});
    EXPECT_EQ(parameter.name, "q_proj.weight");
    EXPECT_EQ(parameter.value.dtype(), dtype);
    EXPECT_EQ(parameter.gradient.dtype(), gradient_dtype);
    EXPECT_EQ(parameter.value.shape(), (Dims{3, 5}));
    EXPECT_EQ(parameter.gradient.shape(), (Dims{3, 5}));
    EXPECT_EQ(parameter.value.device(), context_.device());
    EXPECT_EQ(parameter.gradient.device(), context_.device());
    EXPECT_EQ(parameter.num_elements(), 15);
    EXPECT_EQ(elements_of(parameter.value), Elements(15, 0));
    EXPECT_EQ(elements_of(parameter.gradient), Elements(15, 0));
  }
}

TEST_P(ParameterTest, MayBeAScalarOrEmpty) {
  EXPECT_EQ(zeros("scale", DType::kF32, {}).num_elements(), 1);
  EXPECT_EQ(zeros("none", DType::kF32, {0, 4}).num_elements(), 0);
  EXPECT_EQ(Parameter{}.num_elements(), 0);
}

TEST_P(ParameterTest, CopiesAreDeep) {
  Parameter original = zeros("w", DType::kBF16, {2});
  original.value = there(Tensor::from_values(DType::kBF16, {2}, {1, 2}));
  original.gradient = there(Tensor::from_values(DType::kF32, {2}, {3, 4}));
  const Parameter copy = original.copy();
  test::set_element(context_, original.value, 0, 10);
  test::set_element(context_, original.gradient, 0, 30);
  EXPECT_EQ(copy.name, "w");
  EXPECT_EQ(elements_of(copy.value), (Elements{1, 2}));
  EXPECT_EQ(elements_of(copy.gradient), (Elements{3, 4}));
}

TEST_P(ParameterTest, CopiesWhatIsThere) {
  Parameter original = zeros("w", DType::kF32, {2, 0});
  original.gradient = Tensor();
  const Parameter copy = original.copy();
  EXPECT_EQ(copy.value.shape(), (Dims{2, 0}));
  EXPECT_TRUE(copy.gradient.view().absent());
  const Parameter nothing = Parameter{}.copy();
  EXPECT_TRUE(nothing.value.view().absent());
}

TEST_P(ParameterTest, RefusesBoolsAndImpossibleShapes) {
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

TEST_P(ParameterTest, GradientsComeWhenTheyAreAskedFor) {
  Parameter parameter = Parameter::zeros_without_gradient("w", DType::kBF16, {2, 3}).to(context_);
  EXPECT_TRUE(parameter.gradient.view().absent());
  parameter.zero_gradient(context_);  // nothing to clear
  parameter.make_gradient(context_);
  EXPECT_EQ(parameter.gradient.dtype(), DType::kF32);
  EXPECT_EQ(parameter.gradient.shape(), (Dims{2, 3}));
  test::set_element(context_, parameter.gradient, 5, 7);
  parameter.make_gradient(context_);  // the one that is there stays
  EXPECT_EQ(elements_of(parameter.gradient)[5], 7);
  parameter.zero_gradient(context_);
  EXPECT_EQ(elements_of(parameter.gradient)[5], 0);
}

}  // namespace
}  // namespace ladon
