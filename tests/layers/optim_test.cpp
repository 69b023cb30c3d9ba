// Sgd, AdamW and clip_gradients(host_context()) against formulas worked here in double; master
// weights.
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

#include "core/element.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::error_of;
using test::host_context;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr DType kDtypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};

Values values_of(const Tensor& tensor) {
  Values values(static_cast<std::size_t>(tensor.num_elements()));
  for (std::size_t i = 0; i < values.size(); ++i) {
    values[i] = load_element(tensor.data(), tensor.dtype(), static_cast<std::int64_t>(i));
  }
  return values;
}

void set(Tensor& tensor, const Values& values) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    store_element(tensor.data(), tensor.dtype(), static_cast<std::int64_t>(i), values[i]);
  }
}

Parameter make_parameter(DType dtype, const Values& values, const Values& gradients,
                         const std::string& name = "w") {
  Parameter parameter = Parameter::zeros(name, dtype, {static_cast<std::int64_t>(values.size())});
  set(parameter.value, values);
  set(parameter.gradient, gradients);
  return parameter;
}

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

// ---- SGD ----------------------------------------------------------------------------------------

TEST(Sgd, StepsByHand) {
  // Rate times gradient is 0.0625; with momentum the second velocity is 0.5 * 0.5 + 0.5 = 0.75.
  Parameter parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd plain(host_context(), {&parameter}, {.learning_rate = 0.125});
  plain.step(host_context());
  plain.step(host_context());
  EXPECT_EQ(values_of(parameter.value), Values{0.875});

  parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd heavy(host_context(), {&parameter}, {.learning_rate = 0.125, .momentum = 0.5});
  heavy.step(host_context());
  EXPECT_EQ(values_of(parameter.value), Values{0.9375});
  heavy.step(host_context());
  EXPECT_EQ(values_of(parameter.value), Values{0.84375});
  EXPECT_EQ(values_of(parameter.gradient), Values{0.5});  // not cleared

  // Decay: the gradient becomes 0.5 + 0.25 * 1 = 0.75.
  parameter = make_parameter(DType::kF32, {1}, {0.5});
  Sgd decaying(host_context(), {&parameter}, {.learning_rate = 0.5, .weight_decay = 0.25});
  decaying.step(host_context());
  EXPECT_EQ(values_of(parameter.value), Values{0.625});
}

TEST(Sgd, EqualsTheFormulaWithMomentumAndDecay) {
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
    Sgd optimiser(host_context(), {&other, &parameter}, options);
    for (const Values& gradients : kGradients) {
      set(parameter.gradient, gradients);
      optimiser.step(host_context());
    }
    SCOPED_TRACE(name_of(dtype));
    expect_near(values_of(parameter.value), weights, tolerance_of(dtype));
  }
}

// ---- AdamW --------------------------------------------------------------------------------------

TEST(AdamW, FirstStepIsTheRateTimesTheSign) {
  // Whatever the gradient's size, the corrected mean over the corrected root is its sign.
  Parameter parameter = make_parameter(DType::kF64, {1, 1, 1}, {1e-3, -250, 0});
  AdamW optimiser(host_context(), {&parameter},
                  {.learning_rate = 0.25, .epsilon = 1e-30, .weight_decay = 0});
  optimiser.step(host_context());
  expect_near(values_of(parameter.value), {0.75, 1.25, 1}, 1e-14);
  EXPECT_EQ(optimiser.steps_taken(), 1);
}

TEST(AdamW, EqualsTheFormulaWithDecay) {
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
    AdamW optimiser(host_context(), {&other, &parameter}, options);
    for (const Values& gradients : kGradients) {
      set(parameter.gradient, gradients);
      optimiser.step(host_context());
    }
    SCOPED_TRACE(name_of(dtype));
    expect_near(values_of(parameter.value), weights, tolerance_of(dtype));
  }
}

TEST(AdamW, OptionsThatVanishInFloatGiveNoNan) {
  // 1 - 1e-12 is 1 in f32, and 1e-60 is 0.
  Parameter parameter = make_parameter(DType::kF32, {1, 1}, {2, 0});
  AdamW optimiser(host_context(), {&parameter},
                  {.learning_rate = 0.25,
                   .beta1 = 1 - 1e-12,
                   .beta2 = 1 - 1e-12,
                   .epsilon = 1e-60,
                   .weight_decay = 0});
  optimiser.step(host_context());
  expect_near(values_of(parameter.value), {0.75, 1}, 1e-6);
}

// ---- both ---------------------------------------------------------------------------------------

/// The gradient of sum(curvature * (weight - goal)^2) / 2.
void set_bowl_gradient(Parameter& parameter) {
  const Values curvatures{1, 0.25, 4};
  const Values goals{3, -1, 0.5};
  Values gradients = values_of(parameter.value);
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    gradients[i] = curvatures[i] * (gradients[i] - goals[i]);
  }
  set(parameter.gradient, gradients);
}

TEST(Optimisers, MinimiseABowl) {
  for (const DType dtype : kDtypes) {
    SCOPED_TRACE(name_of(dtype));
    // 16-bit weights land within a unit of the goal, which they can hold.
    const double relative = dtype == DType::kF64 ? 1e-6 : std::max(1e-5, epsilon_of(dtype));
    Parameter parameter = make_parameter(dtype, {-2, 2, 5}, {0, 0, 0});
    Sgd sgd(host_context(), {&parameter}, {.learning_rate = 0.1, .momentum = 0.8});
    for (int step = 0; step < 600; ++step) {
      set_bowl_gradient(parameter);
      sgd.step(host_context());
    }
    expect_near(values_of(parameter.value), {3, -1, 0.5}, relative);

    parameter = make_parameter(dtype, {-2, 2, 5}, {0, 0, 0});
    AdamW adamw(host_context(), {&parameter},
                {.learning_rate = 0.1, .beta2 = 0.99, .weight_decay = 0});
    for (int step = 0; step < 2000; ++step) {
      // AdamW keeps its pace near the goal, so that the rate must fall.
      adamw.set_learning_rate(0.1 * std::pow(0.995, step));
      set_bowl_gradient(parameter);
      adamw.step(host_context());
    }
    expect_near(values_of(parameter.value), {3, -1, 0.5}, std::max(relative, 1e-4));
  }
}

template <class Optimiser, class Options>
void expect_small_steps_to_count(const Options& options, const Values& gradients) {
  const Values start{1, -2, 0.75};
  Parameter wide = make_parameter(DType::kF32, start, gradients);
  Optimiser wide_optimiser(host_context(), {&wide}, options);
  for (int step = 0; step < 1000; ++step) wide_optimiser.step(host_context());
  for (std::size_t i = 0; i < start.size(); ++i) {
    EXPECT_GT(std::abs(values_of(wide.value)[i] - start[i]), 0.05);  // 0.07 to 0.2
  }
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Parameter narrow = make_parameter(dtype, start, gradients);
    Optimiser optimiser(host_context(), {&narrow}, options);
    for (int step = 0; step < 1000; ++step) optimiser.step(host_context());
    // Not only near: the master goes through the very numbers of the f32 weight.
    EXPECT_EQ(values_of(narrow.value),
              values_of(Tensor::copy_of(host_context(), wide.value, dtype)));
  }
}

TEST(Optimisers, MasterWeightsKeepStepsBelowA16BitUnit) {
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

TEST(Optimisers, TakeUpAWeightThatWasSetFromOutside) {
  Parameter parameter = make_parameter(DType::kBF16, {1, 1}, {1, 1});
  Sgd optimiser(host_context(), {&parameter}, {.learning_rate = 1e-3});
  optimiser.step(host_context());
  store_element(parameter.value.data(), DType::kBF16, 0, 5);
  for (int step = 0; step < 99; ++step) optimiser.step(host_context());
  const Values weights = values_of(parameter.value);
  EXPECT_EQ(weights[0], static_cast<double>(static_cast<float>(bfloat16(5 - 0.099))));
  EXPECT_EQ(weights[1], static_cast<double>(static_cast<float>(bfloat16(1 - 0.1))));
}

TEST(Optimisers, ScalarsEmptyParametersAndNoneAtAll) {
  Parameter scalar = Parameter::zeros("scalar", DType::kF32, {});
  Parameter empty = Parameter::zeros("empty", DType::kBF16, {0, 3});
  set(scalar.gradient, {1});
  Sgd sgd(host_context(), {&scalar, &empty}, {.learning_rate = 0.5, .momentum = 0.5});
  sgd.step(host_context());
  EXPECT_EQ(values_of(scalar.value), Values{-0.5});
  AdamW adamw(host_context(), {&empty, &scalar}, {.learning_rate = 0.5});
  adamw.step(host_context());
  expect_near(values_of(scalar.value), {-0.9975}, 1e-6);
  Sgd(host_context(), {}, {}).step(host_context());
  EXPECT_EQ(clip_gradients(host_context(), {}, 1), 0);
}

TEST(Optimisers, AGradientMayComeAfterTheOptimiser) {
  Parameter parameter{"w", Tensor::from_values(DType::kF32, {1}, {1})};
  Sgd optimiser(host_context(), {&parameter}, {.learning_rate = 0.5});
  parameter.gradient = Tensor::from_values(DType::kF32, {1}, {1});
  Sgd moved = std::move(optimiser);
  moved.step(host_context());
  EXPECT_EQ(values_of(parameter.value), Values{0.5});
}

// ---- clipping -----------------------------------------------------------------------------------

TEST(ClipGradients, ScalesDownToTheNormAndNeverUp) {
  Parameter a = make_parameter(DType::kBF16, {0, 0}, {3, 0}, "a");
  Parameter b = make_parameter(DType::kF64, {0}, {-4}, "b");
  const std::array<Parameter*, 2> parameters{&a, &b};
  for (const double max_norm : {6.0, 5.0, kInfinity}) {
    EXPECT_EQ(clip_gradients(host_context(), parameters, max_norm), 5);
    EXPECT_EQ(values_of(a.gradient), (Values{3, 0}));
    EXPECT_EQ(values_of(b.gradient), Values{-4});
  }
  EXPECT_EQ(clip_gradients(host_context(), parameters, 2.5), 5);
  EXPECT_EQ(values_of(a.gradient), (Values{1.5, 0}));
  EXPECT_EQ(values_of(b.gradient), Values{-2});
}

TEST(ClipGradients, ZeroStaysAndWhatIsNotFiniteIsLeftAlone) {
  Parameter parameter = make_parameter(DType::kF32, {0, 0}, {0, 0});
  const std::array<Parameter*, 1> parameters{&parameter};
  EXPECT_EQ(clip_gradients(host_context(), parameters, 1), 0);
  EXPECT_EQ(values_of(parameter.gradient), (Values{0, 0}));
  set(parameter.gradient, {8, -kInfinity});
  EXPECT_EQ(clip_gradients(host_context(), parameters, 1), kInfinity);
  EXPECT_EQ(values_of(parameter.gradient), (Values{8, -kInfinity}));
  set(parameter.gradient, {8, kNan});
  EXPECT_TRUE(std::isnan(clip_gradients(host_context(), parameters, 1)));
  EXPECT_EQ(values_of(parameter.gradient)[0], 8);
}

TEST(ClipGradients, SquaresMayLeaveTheRangeOfDouble) {
  Parameter parameter = make_parameter(DType::kF64, {0, 0}, {0, 0});
  const std::array<Parameter*, 1> parameters{&parameter};
  for (const double size : {1e300, 1e-300}) {
    set(parameter.gradient, {3 * size, 4 * size});
    EXPECT_DOUBLE_EQ(clip_gradients(host_context(), parameters, size), 5 * size);
    EXPECT_DOUBLE_EQ(values_of(parameter.gradient)[0], 0.6 * size);
    EXPECT_DOUBLE_EQ(values_of(parameter.gradient)[1], 0.8 * size);
  }
}

// ---- errors -------------------------------------------------------------------------------------

TEST(OptimiserErrors, Options) {
  const auto sgd = [](const SgdOptions& options) {
    return error_of([&] { Sgd(host_context(), {}, options); });
  };
  const auto adamw = [](const AdamWOptions& options) {
    return error_of([&] { AdamW(host_context(), {}, options); });
  };
  const std::string rate = "learning_rate: got -1, expected 0 or a positive number";
  EXPECT_EQ(sgd({.learning_rate = -1}), "Sgd: " + rate);
  EXPECT_EQ(sgd({.momentum = 1}), "Sgd: momentum: got 1, expected a number in [0, 1)");
  EXPECT_EQ(sgd({.weight_decay = -0.5}),
            "Sgd: weight_decay: got -0.5, expected a finite number of 0 or more");
  EXPECT_EQ(adamw({.learning_rate = kInfinity}),
            "AdamW: learning_rate: got inf, expected 0 or a positive number");
  EXPECT_EQ(adamw({.beta1 = 1.5}), "AdamW: beta1: got 1.5, expected a number in [0, 1)");
  EXPECT_EQ(adamw({.beta2 = kNan}), "AdamW: beta2: got nan, expected a number in [0, 1)");
  EXPECT_EQ(adamw({.epsilon = 0}), "AdamW: epsilon: got 0, expected a positive finite number");
  EXPECT_EQ(adamw({.weight_decay = kInfinity}),
            "AdamW: weight_decay: got inf, expected a finite number of 0 or more");
  Sgd plain(host_context(), {}, {});
  AdamW adaptive(host_context(), {}, {});
  EXPECT_EQ(error_of([&] { plain.set_learning_rate(-1); }), "Sgd::set_learning_rate: " + rate);
  EXPECT_EQ(error_of([&] { adaptive.set_learning_rate(-1); }), "AdamW::set_learning_rate: " + rate);
  EXPECT_EQ(plain.options().learning_rate, SgdOptions{}.learning_rate);
  EXPECT_EQ(adaptive.options().learning_rate, AdamWOptions{}.learning_rate);
  EXPECT_EQ(error_of([] { clip_gradients(host_context(), {}, 0); }),
            "clip_gradients: max_norm: got 0, expected a positive number");
}

/// By all who take a list of parameters.
void expect_refused(const std::vector<Parameter*>& parameters, const std::string& what) {
  EXPECT_EQ(error_of([&] { Sgd(host_context(), parameters, {}); }), "Sgd: " + what);
  EXPECT_EQ(error_of([&] { AdamW(host_context(), parameters, {}); }), "AdamW: " + what);
  EXPECT_EQ(error_of([&] { clip_gradients(host_context(), parameters, 1); }),
            "clip_gradients: " + what);
}

TEST(OptimiserErrors, Parameters) {
  Parameter good = make_parameter(DType::kF32, {1, 2}, {3, 4}, "good");
  Parameter bad = make_parameter(DType::kBF16, {1, 2}, {3, 4}, "bad");
  expect_refused({&good, nullptr}, "parameters[1]: got a null pointer, expected a parameter");
  expect_refused({&good, &bad, &good},
                 "parameters[2] (good): got the same parameter as parameters[0], expected each "
                 "once");
  bad.gradient = Tensor(DType::kBF16, {2});
  expect_refused({&good, &bad}, "parameters[1].gradient (bad): got dtype bf16, expected f32");
  bad.gradient = Tensor(DType::kF32, {2, 1});
  expect_refused({&good, &bad}, "parameters[1].gradient (bad): got [2, 1], expected [2]");
  bad.value = Tensor(DType::kBool, {2});
  expect_refused({&good, &bad},
                 "parameters[1].value (bad): got dtype bool, expected f64, f32, f16 or bf16");
  Parameter nameless;
  expect_refused({&nameless}, "parameters[0].value: got none, expected a tensor");
  EXPECT_EQ(values_of(good.gradient), (Values{3, 4}));  // not clipped before the bad one was seen
}

template <class Optimiser>
void expect_steps_to_refuse(const std::string& step) {
  Parameter good = make_parameter(DType::kF32, {1, 2}, {3, 4}, "good");
  Parameter bad = make_parameter(DType::kF32, {1, 2}, {3, 4}, "bad");
  Optimiser optimiser(host_context(), {&good, &bad}, {});
  bad.gradient = Tensor();
  EXPECT_EQ(error_of([&] { optimiser.step(host_context()); }),
            step + ": parameters[1].gradient (bad): got none, expected a tensor");
  bad = make_parameter(DType::kF32, {1, 2, 3}, {3, 4, 5}, "bad");
  EXPECT_EQ(error_of([&] { optimiser.step(host_context()); }),
            step + ": parameters[1].value (bad): got [3], expected [2]");
  bad = make_parameter(DType::kF16, {1, 2}, {3, 4}, "bad");
  EXPECT_EQ(error_of([&] { optimiser.step(host_context()); }),
            step + ": parameters[1].value (bad): got dtype f16, expected f32");
  EXPECT_EQ(values_of(good.value), (Values{1, 2}));  // the first in the list has not moved either
  // Nor have the running means or the count of steps: the next step is as a first one.
  bad = make_parameter(DType::kF32, {1, 2}, {3, 4}, "bad");
  optimiser.step(host_context());
  Parameter fresh = make_parameter(DType::kF32, {1, 2}, {3, 4});
  Optimiser(host_context(), {&fresh}, {}).step(host_context());
  EXPECT_EQ(values_of(good.value), values_of(fresh.value));
}

TEST(OptimiserErrors, Steps) {
  expect_steps_to_refuse<Sgd>("Sgd::step");
  expect_steps_to_refuse<AdamW>("AdamW::step");
}

}  // namespace
}  // namespace ladon
