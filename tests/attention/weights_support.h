// What the tests of attention_weights() share.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {

inline constexpr double kInfinity = std::numeric_limits<double>::infinity();
inline constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
inline constexpr ScoreStage kStages[] = {ScoreStage::kScaled, ScoreStage::kSoftcapped,
                                         ScoreStage::kMasked, ScoreStage::kProbability,
                                         ScoreStage::kDropped};

inline std::vector<double> values_of(const ConstTensorView& view) {
  const Tensor wide = Tensor::copy_of(host_context(), view, DType::kF64);
  return {wide.data_as<double>(), wide.data_as<double>() + wide.num_elements()};
}

inline void expect_near_all(const std::vector<double>& got, const std::vector<double>& expected,
                            double epsilon, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(expected[i])) {
      EXPECT_EQ(got[i], expected[i]) << what << " at " << i;
    } else {
      // The second term is the gap between the smallest numbers of f16.
      const double tolerance = epsilon * std::abs(expected[i]) + (epsilon > 1e-5 ? 0x1p-24 : 1e-14);
      EXPECT_NEAR(got[i], expected[i], tolerance) << what << " at " << i;
    }
  }
}

inline std::vector<double> weights_of(const Context& context, const ConstTensorView& q,
                                      const ConstTensorView& k, const AttentionOptions& options,
                                      ScoreStage stage, DType dtype = DType::kF64) {
  Tensor weights(dtype, {q.size(0), q.size(2), q.size(1), k.size(1)});
  fill_normal(host_context(), weights, 0, 1, 99);  // everything must be overwritten
  host_attention_weights(context, q, k, options, weights, stage);
  return values_of(weights);
}

/// All instruction sets share the reference's code, so the fastest one stands for them.
#define LADON_IN_FASTEST_PLACES(Suite)                                         \
  INSTANTIATE_TEST_SUITE_P(FastestPlaces, Suite,                               \
                           testing::ValuesIn(::ladon::test::fastest_places()), \
                           ::ladon::test::place_name)

}  // namespace ladon::test
