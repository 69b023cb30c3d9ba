// Sgd, AdamW and clip_gradients() against formulas worked here in double; master weights.
#include "ladon/optim.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "support/contexts.h"

namespace ladon {
namespace {

using test::elements_of;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kDtypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

void expect_near(const Values& got, const Values& expected, double relative) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    EXPECT_NEAR(got[i], expected[i], relative * std::max(1e-3, std::abs(expected[i]))) << i;
  }
}

/// What a few steps of arithmetic may lose: a 16-bit weight is rounded once, from its master.
double tolerance_of(DType dtype) { return dtype == DType::kF64 ? 1e-14 : 4 * epsilon_of(dtype); }

/// Three steps with these gradients; weights that every dtype holds.
const Values kWeights{1, -0.5, 2, 0};
const std::array<Values, 3> kGradients{Values{0.5, -0.25, 1, 3}, Values{-1, 0.125, 0.75, 0},
                                       Values{0.25, 2, -4, 1}};

class Optimisers : public test::ContextTest {
 protected:
  Parameter make_parameter(DType dtype, const Values& values, const Values& gradients,
                           const std::string& name = "w") const {
    const auto count = static_cast<std::int64_t>(values.size());
    Parameter parameter = Parameter::zeros(name, dtype, {count}).to(context_);
    set(parameter.value, values);
    set(parameter.gradient, gradients);
    return parameter;
  }
  void set(Tensor& tensor, const Values& values) const {
    test::set_elements(context_, tensor, values);
  }
  /// The gradient of sum(curvature * (weight - goal)^2) / 2.
  void set_bowl_gradient(Parameter& parameter) const {
    const Values curvatures{1, 0.25, 4};
    const Values goals{3, -1, 0.5};
    Values gradients = elements_of(parameter.value);
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      gradients[i] = curvatures[i] * (gradients[i] - goals[i]);
    }
    set(parameter.gradient, gradients);
  }
  template <class Optimiser, class Options>
  void expect_small_steps_to_count(const Options& options, const Values& gradients) const {
    const Values start{1, -2, 0.75};
    Parameter wide = make_parameter(DType::kF32, start, gradients);
    Optimiser wide_optimiser(context_, {&wide}, options);
    for (int step = 0; step < 1000; ++step) wide_optimiser.step(context_);
    for (std::size_t i = 0; i < start.size(); ++i) {
      EXPECT_GT(std::abs(elements_of(wide.value)[i] - start[i]), 0.05);  // 0.07 to 0.2
    }
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Parameter narrow = make_parameter(dtype, start, gradients);
      Optimiser optimiser(context_, {&narrow}, options);
      for (int step = 0; step < 1000; ++step) optimiser.step(context_);
      // Not only near: the master goes through the very numbers of the f32 weight.
      EXPECT_EQ(elements_of(narrow.value),
                elements_of(Tensor::copy_of(context_, wide.value, dtype)));
    }
  }
};
class SgdTest : public Optimisers {};
class AdamWTest : public Optimisers {};
class ClipGradients : public Optimisers {};
LADON_FOR_EACH_CONTEXT(Optimisers);
LADON_FOR_EACH_CONTEXT(SgdTest);
LADON_FOR_EACH_CONTEXT(AdamWTest);
LADON_FOR_EACH_CONTEXT(ClipGradients);

// ---- SGD ----------------------------------------------------------------------------------------

TEST_P(SgdTest, StepsByHand) {
  // Rate times gradient is 0.0625; with momentum the second velocity is 0.5 * 0.5 + 0.5 = 0.75.
  Parameter parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd plain(context_, {&parameter}, {.learning_rate = 0.125});
  plain.step(context_);
  plain.step(context_);
  EXPECT_EQ(elements_of(parameter.value), Values{0.875});

  parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd heavy(context_, {&parameter}, {.learning_rate = 0.125, .momentum = 0.5});
  heavy.step(context_);
  EXPECT_EQ(elements_of(parameter.value), Values{0.9375});
  heavy.step(context_);
  EXPECT_EQ(elements_of(parameter.value), Values{0.84375});
  EXPECT_EQ(elements_of(parameter.gradient), Values{0.5});  // not cleared

  // Decay: the gradient becomes 0.5 + 0.25 * 1 = 0.75.
  parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd decaying(context_, {&parameter}, {.learning_rate = 0.5, .weight_decay = 0.25});
  decaying.step(context_);
  EXPECT_EQ(elements_of(parameter.value), Values{0.625});
}

TEST_P(SgdTest, EqualsTheFormulaWithMomentumAndDecay) {
  const SgdOptions options{.learning_rate = 0.03, .momentum = 0.9, .weight_decay = 0.1};
  Values weights = kWeights;
  Values velocities(weights.size(), 0.0);
  for (const Values& gradients : kGradients) {
    for (std::size_t i = 0; i < weights.size(); ++i) {
      velocities[i] = 0.9 * velocities[i] + gradients[i] + 0.1 * weights[i];
      weights[i] -= 0.03 * velocities[i];
    }
  }
  for (const DType dtype : kDtypes) {
    // Two parameters: state must not be mixed up.
    Parameter other = make_parameter(dtype, {7, 8}, {0, 0}, "other");
    Parameter parameter = make_parameter(dtype, kWeights, {0, 0, 0, 0});
    Sgd optimiser(context_, {&other, &parameter}, options);
    for (const Values& gradients : kGradients) {
      set(parameter.gradient, gradients);
      optimiser.step(context_);
    }
    SCOPED_TRACE(name_of(dtype));
    expect_near(elements_of(parameter.value), weights, tolerance_of(dtype));
  }
}

// ---- AdamW --------------------------------------------------------------------------------------

TEST_P(AdamWTest, FirstStepIsTheRateTimesTheSign) {
  // Whatever the gradient's size, the corrected mean over the corrected root is its sign.
  Parameter parameter = make_parameter(DType::kF64, {1, 1, 1}, {1e-3, -250, 0});
  AdamW optimiser(context_, {&parameter},
                  {.learning_rate = 0.25, .epsilon = 1e-30, .weight_decay = 0});
  optimiser.step(context_);
  expect_near(elements_of(parameter.value), {0.75, 1.25, 1}, 1e-14);
  EXPECT_EQ(optimiser.steps_taken(), 1);
}

TEST_P(AdamWTest, EqualsTheFormulaWithDecay) {
  const AdamWOptions options{
      .learning_rate = 0.02, .beta1 = 0.8, .beta2 = 0.99, .epsilon = 1e-3, .weight_decay = 0.25};
  Values weights = kWeights;
  Values means(weights.size(), 0.0);
  Values squares(weights.size(), 0.0);
  int t = 0;
  for (const Values& gradients : kGradients) {
    ++t;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      // As in the paper's algorithm 2, decay first.
      weights[i] = weights[i] - 0.02 * 0.25 * weights[i];
      means[i] = 0.8 * means[i] + 0.2 * gradients[i];
      squares[i] = 0.99 * squares[i] + 0.01 * gradients[i] * gradients[i];
      const double mean = means[i] / (1 - std::pow(0.8, t));
      const double square = squares[i] / (1 - std::pow(0.99, t));
      weights[i] -= 0.02 * mean / (std::sqrt(square) + 1e-3);
    }
  }
  for (const DType dtype : kDtypes) {
    Parameter other = make_parameter(dtype, {7, 8}, {0, 0}, "other");
    Parameter parameter = make_parameter(dtype, kWeights, {0, 0, 0, 0});
    AdamW optimiser(context_, {&other, &parameter}, options);
    for (const Values& gradients : kGradients) {
      set(parameter.gradient, gradients);
      optimiser.step(context_);
    }
    SCOPED_TRACE(name_of(dtype));
    expect_near(elements_of(parameter.value), weights, tolerance_of(dtype));
  }
}

TEST_P(AdamWTest, OptionsThatVanishInFloatGiveNoNan) {
  // 1 - 1e-12 is 1 in f32, and 1e-60 is 0.
  Parameter parameter = make_parameter(DType::kF32, {1, 1}, {2, 0});
  AdamW optimiser(context_, {&parameter},
                  {.learning_rate = 0.25,
                   .beta1 = 1 - 1e-12,
                   .beta2 = 1 - 1e-12,
                   .epsilon = 1e-60,
                   .weight_decay = 0});
  optimiser.step(context_);
  expect_near(elements_of(parameter.value), {0.75, 1}, 1e-6);
}

// ---- both ---------------------------------------------------------------------------------------

TEST_P(Optimisers, MinimiseABowl) {
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name_of(dtype));
    // 16-bit weights land within a unit of the goal, which they can hold.
    const double relative = dtype == DType::kF64 ? 1e-6 : std::max(1e-5, epsilon_of(dtype));
    Parameter parameter = make_parameter(dtype, {-2, 2, 5}, {0, 0, 0});
    Sgd sgd(context_, {&parameter}, {.learning_rate = 0.1, .momentum = 0.8});
    for (int step = 0; step < 600; ++step) {
      set_bowl_gradient(parameter);
      sgd.step(context_);
    }
    expect_near(elements_of(parameter.value), {3, -1, 0.5}, relative);

    parameter = make_parameter(dtype, {-2, 2, 5}, {0, 0, 0});
    AdamW adamw(context_, {&parameter}, {.learning_rate = 0.1, .beta2 = 0.99, .weight_decay = 0});
    for (int step = 0; step < 2000; ++step) {
      // AdamW keeps its pace near the goal, so that the rate must fall.
      adamw.set_learning_rate(0.1 * std::pow(0.995, step));
      set_bowl_gradient(parameter);
      adamw.step(context_);
    }
    expect_near(elements_of(parameter.value), {3, -1, 0.5}, std::max(relative, 1e-4));
  }
}

TEST_P(Optimisers, MasterWeightsKeepStepsBelowA16BitUnit) {
  const Values proportional{1, -2, 0.75};  // steps of 1e-4 of each weight
  expect_small_steps_to_count<Sgd>(SgdOptions{.learning_rate = 1e-4}, proportional);
  expect_small_steps_to_count<AdamW>(AdamWOptions{.learning_rate = 1e-4, .weight_decay = 0},
                                     proportional);
  // Without a master the same thousand steps go nowhere.
  bfloat16 brain(1.0F);
  float16 half(1.0F);
  for (int step = 0; step < 1000; ++step) {
    brain = bfloat16(static_cast<float>(brain) - 1e-4F);
    half = float16(static_cast<float>(half) - 1e-4F);
  }
  EXPECT_EQ(static_cast<float>(brain), 1.0F);
  EXPECT_EQ(static_cast<float>(half), 1.0F);
}

TEST_P(Optimisers, TakeUpAWeightThatWasSetFromOutside) {
  Parameter parameter = make_parameter(DType::kBF16, {1, 1}, {1, 1});
  Sgd optimiser(context_, {&parameter}, {.learning_rate = 1e-3});
  optimiser.step(context_);
  test::set_element(context_, parameter.value, 0, 5);
  for (int step = 0; step < 99; ++step) optimiser.step(context_);
  const Values weights = elements_of(parameter.value);
  EXPECT_EQ(weights[0], static_cast<double>(static_cast<float>(bfloat16(5 - 0.099))));
  EXPECT_EQ(weights[1], static_cast<double>(static_cast<float>(bfloat16(1 - 0.1))));
}

TEST_P(Optimisers, ScalarsEmptyParametersAndNoneAtAll) {
  Parameter scalar = Parameter::zeros("scalar", DType::kF32, {}).to(context_);
  Parameter empty = Parameter::zeros("empty", DType::kBF16, {0, 3}).to(context_);
  set(scalar.gradient, {1});
  Sgd sgd(context_, {&scalar, &empty}, {.learning_rate = 0.5, .momentum = 0.5});
  sgd.step(context_);
  EXPECT_EQ(elements_of(scalar.value), Values{-0.5});
  AdamW adamw(context_, {&empty, &scalar}, {.learning_rate = 0.5});
  adamw.step(context_);
  expect_near(elements_of(scalar.value), {-0.9975}, 1e-6);
  Sgd(context_, {}, {}).step(context_);
  EXPECT_EQ(clip_gradients(context_, {}, 1), 0);
}

TEST_P(Optimisers, AGradientMayComeAfterTheOptimiser) {
  Parameter parameter{"w", there(Tensor::from_values(DType::kF32, {1}, {1}))};
  Sgd optimiser(context_, {&parameter}, {.learning_rate = 0.5});
  parameter.gradient = there(Tensor::from_values(DType::kF32, {1}, {1}));
  Sgd moved = std::move(optimiser);
  moved.step(context_);
  EXPECT_EQ(elements_of(parameter.value), Values{0.5});
}

// ---- clipping -----------------------------------------------------------------------------------

TEST_P(ClipGradients, ScalesDownToTheNormAndNeverUp) {
  Parameter a = make_parameter(DType::kBF16, {0, 0}, {3, 0}, "a");
  Parameter b = make_parameter(DType::kF64, {0}, {-4}, "b");
  const std::array<Parameter*, 2> parameters{&a, &b};
  for (const double max_norm : {6.0, 5.0, kInfinity}) {
    EXPECT_EQ(clip_gradients(context_, parameters, max_norm), 5);
    EXPECT_EQ(elements_of(a.gradient), (Values{3, 0}));
    EXPECT_EQ(elements_of(b.gradient), Values{-4});
  }
  EXPECT_EQ(clip_gradients(context_, parameters, 2.5), 5);
  EXPECT_EQ(elements_of(a.gradient), (Values{1.5, 0}));
  EXPECT_EQ(elements_of(b.gradient), Values{-2});
}

TEST_P(ClipGradients, ZeroStaysAndWhatIsNotFiniteIsLeftAlone) {
  Parameter parameter = make_parameter(DType::kF32, {0, 0}, {0, 0});
  const std::array<Parameter*, 1> parameters{&parameter};
  EXPECT_EQ(clip_gradients(context_, parameters, 1), 0);
  EXPECT_EQ(elements_of(parameter.gradient), (Values{0, 0}));
  set(parameter.gradient, {8, -kInfinity});
  EXPECT_EQ(clip_gradients(context_, parameters, 1), kInfinity);
  EXPECT_EQ(elements_of(parameter.gradient), (Values{8, -kInfinity}));
  set(parameter.gradient, {8, kNan});
  EXPECT_TRUE(std::isnan(clip_gradients(context_, parameters, 1)));
  EXPECT_EQ(elements_of(parameter.gradient)[0], 8);
}

TEST_P(ClipGradients, SquaresMayLeaveTheRangeOfDouble) {
  Parameter parameter = make_parameter(DType::kF64, {0, 0}, {0, 0});
  const std::array<Parameter*, 1> parameters{&parameter};
  for (const double size : {1e300, 1e-300}) {
    set(parameter.gradient, {3 * size, 4 * size});
    EXPECT_DOUBLE_EQ(clip_gradients(context_, parameters, size), 5 * size);
    EXPECT_DOUBLE_EQ(elements_of(parameter.gradient)[0], 0.6 * size);
    EXPECT_DOUBLE_EQ(elements_of(parameter.gradient)[1], 0.8 * size);
  }
}

}  // namespace
}  // namespace ladon
