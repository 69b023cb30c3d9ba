// The ONNX operator suite (76 Attention and 8 RotaryEmbedding nodes) in every place.
//
// Two bounds hold for every output element with expected value b:
//   all dtypes   |a - b| <= 1e-7 + 1e-3 * |b|        ONNX's own. For f16 it is just above one unit
//                                                    in the last place (9.8e-4), so it is tight.
//   f32          |a - b| <= 2e-6 * max(1, |b|)       17 epsilon. No output here sums more than 18
//                                                    terms, and inputs are of order 1.
// The f32 bound is fair: the expected values of all Attention nodes, f16 ones too, are double
// results rounded once (ONNX's generator promotes to float64, and recomputing in double gives the
// same bits); those of RotaryEmbedding were made in f32 and are within 1e-7 of the double result.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <initializer_list>
#include <iostream>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "conformance/onnx_attention.h"
#include "conformance/safetensors_fixture.h"
#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/tensor.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::conformance {
namespace {

using test::Place;
using test::places;

constexpr std::size_t kNumCases = 84;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

/// The suite, or why there is none. A missing folder is no fault; a broken file is.
struct Suite {
  std::vector<OnnxCase> cases;
  std::string missing;
  std::string broken;
};

Suite load_suite() {
  Suite suite;
  const std::filesystem::path dir = conformance_dir();
  try {
    for (const auto& path : {onnx_cases_path(dir), onnx_tensors_path(dir)}) {
      if (!std::filesystem::exists(path)) {
        suite.missing =
            "skipped: no " + path.string() + "; set LADON_CONFORMANCE_DIR to its folder";
        return suite;
      }
    }
    suite.cases = read_onnx_suite(dir);
  } catch (const std::exception& error) {
    suite.broken = error.what();
  }
  return suite;
}

const Suite& the_suite() {
  static const Suite suite = load_suite();
  return suite;
}

bool within_bounds(double actual, double expected, DType dtype) {
  if (!std::isfinite(expected)) return actual == expected;
  const double error = std::abs(actual - expected);
  const double onnx_bound = 1e-7 + 1e-3 * std::abs(expected);
  const double f32_bound = 2e-6 * std::max(1.0, std::abs(expected));
  // Written so that a NaN fails.
  return error <= onnx_bound && (dtype != DType::kF32 || error <= f32_bound);
}

/// Empty where the output is right, else what is wrong with it.
std::string compare(const ConstTensorView& actual, const ConstTensorView& expected) {
  std::ostringstream problem;
  if (actual.dtype() != expected.dtype() || !(actual.shape() == expected.shape())) {
    problem << name_of(actual.dtype()) << actual.shape().to_string() << " came, "
            << name_of(expected.dtype()) << expected.shape().to_string() << " was expected";
    return problem.str();
  }
  const Tensor actual_values = Tensor::copy_of(test::host_context(), actual, DType::kF64);
  const Tensor expected_values = Tensor::copy_of(test::host_context(), expected, DType::kF64);
  const double* a = actual_values.data_as<double>();
  const double* b = expected_values.data_as<double>();
  std::int64_t num_wrong = 0;
  for (std::int64_t i = 0; i < expected.num_elements(); ++i) {
    if (within_bounds(a[i], b[i], expected.dtype())) continue;
    if (num_wrong == 0) {
      problem.precision(9);
      problem << "element " << i << " is " << a[i] << ", expected " << b[i];
    }
    ++num_wrong;
  }
  if (num_wrong > 0) problem << "; " << num_wrong << " of " << expected.num_elements() << " wrong";
  return problem.str();
}

/// Runs one node and compares every output that it lists. Empty where all are right.
std::string check_case(const Context& context, const OnnxCase& onnx_case) {
  if (onnx_case.expected.empty()) return "the case lists no output";
  try {
    const OnnxOutputs outputs = run_onnx_case(context, onnx_case);
    for (const auto& [slot, expected] : onnx_case.expected) {
      const auto actual = outputs.find(slot);
      if (actual == outputs.end()) return slot + ": not made";
      const std::string problem = compare(actual->second, expected);
      if (!problem.empty()) return slot + ": " + problem;
    }
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

struct CaseInPlace {
  std::size_t case_index;
  Place place;
};

const OnnxCase& case_of(const CaseInPlace& param) { return the_suite().cases[param.case_index]; }

// GoogleTest would print the bytes of the struct otherwise.
void PrintTo(const CaseInPlace& param, std::ostream* out) {
  *out << case_of(param).name << " on " << param.place.name();
}

std::vector<CaseInPlace> all_cases() {
  std::vector<CaseInPlace> params;
  for (const Place& place : places()) {
    for (std::size_t i = 0; i < the_suite().cases.size(); ++i) params.push_back({i, place});
  }
  return params;
}

std::string name_of_param(const testing::TestParamInfo<CaseInPlace>& param_info) {
  return param_info.param.place.name() + "_" + case_of(param_info.param).name;
}

class OnnxConformance : public testing::TestWithParam<CaseInPlace> {};
// There are no parameters where the vectors are absent; OnnxSuite below then says so.
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(OnnxConformance);

TEST_P(OnnxConformance, OutputsMatch) {
  const Context context = GetParam().place.context();
  EXPECT_EQ(check_case(context, case_of(GetParam())), "");
}

INSTANTIATE_TEST_SUITE_P(Cases, OnnxConformance, testing::ValuesIn(all_cases()), name_of_param);

TEST(OnnxComparison, SeesWrongValues) {
  const Tensor expected = Tensor::from_values(DType::kF32, {3}, {0.5, 0, -kInfinity});
  EXPECT_EQ(compare(expected, expected), "");
  const auto differs = [&](std::initializer_list<double> values) {
    const Tensor actual = Tensor::from_values(DType::kF32, {3}, values);
    return !compare(actual, expected).empty();
  };
  EXPECT_FALSE(differs({0.5 + 1e-6, 0, -kInfinity}));
  EXPECT_TRUE(differs({0.5 + 3e-6, 0, -kInfinity}));
  EXPECT_TRUE(differs({0.5, 2e-7, -kInfinity}));
  EXPECT_TRUE(differs({0.5, std::nan(""), -kInfinity}));
  EXPECT_TRUE(differs({0.5, 0, -1e30}));
  EXPECT_TRUE(differs({0.5, 0, kInfinity}));
  const Tensor other_shape = Tensor::from_values(DType::kF32, {1, 3}, {0.5, 0, -kInfinity});
  EXPECT_NE(compare(other_shape, expected), "");
  const Tensor other_dtype = Tensor::from_values(DType::kF16, {3}, {0.5, 0, -kInfinity});
  EXPECT_NE(compare(other_dtype, expected), "");
}

// Runs all cases once more instead of counting the tests above, so that the figures stand whatever
// filter or order these run in.
TEST(OnnxSuite, EveryCaseRunsInEveryPlace) {
  const Suite& suite = the_suite();
  ASSERT_EQ(suite.broken, "");
  if (!suite.missing.empty()) GTEST_SKIP() << suite.missing;
  ASSERT_EQ(suite.cases.size(), kNumCases);
  ASSERT_FALSE(places().empty());
  for (const Place& place : places()) {
    const Context context = place.context();
    std::size_t num_right = 0;
    for (const OnnxCase& onnx_case : suite.cases) {
      const std::string problem = check_case(context, onnx_case);
      if (problem.empty()) ++num_right;
      EXPECT_EQ(problem, "") << onnx_case.name << " on " << place.name();
    }
    std::cout << "ONNX suite on " << place.name() << ": " << num_right << " of "
              << suite.cases.size() << '\n';
    EXPECT_EQ(num_right, kNumCases) << place.name();
  }
}

}  // namespace
}  // namespace ladon::conformance
