// What Sgd, AdamW and clip_gradients() refuse: options, and parameters that are not what they were.
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <vector>

#include "ladon/optim.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::elements_of;
using test::error_of;
using Values = std::vector<double>;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

class OptimiserErrors : public test::ContextTest {
 protected:
  /// Of any dtype but f64.
  Parameter make_parameter(DType dtype, const Values& values, const Values& gradients,
                           const std::string& name = "w") const {
    const Dims shape{static_cast<std::int64_t>(values.size())};
    return {name, there(Tensor::from_values(dtype, shape, values)),
            there(Tensor::from_values(DType::kF32, shape, gradients))};
  }
  /// By all who take a list of parameters.
  void expect_refused(const std::vector<Parameter*>& parameters, const std::string& what) const {
    EXPECT_EQ(error_of([&] { Sgd(context_, parameters, {}); }), "Sgd: " + what);
    EXPECT_EQ(error_of([&] { AdamW(context_, parameters, {}); }), "AdamW: " + what);
    EXPECT_EQ(error_of([&] { clip_gradients(context_, parameters, 1); }),
              "clip_gradients: " + what);
  }
  template <class Optimiser>
  void expect_steps_to_refuse(const std::string& step) const {
    Parameter good = make_parameter(DType::kF32, {1, 2}, {3, 4}, "good");
    Parameter bad = make_parameter(DType::kF32, {1, 2}, {3, 4}, "bad");
    Optimiser optimiser(context_, {&good, &bad}, {});
    bad.gradient = Tensor();
    EXPECT_EQ(error_of([&] { optimiser.step(context_); }),
              step + ": parameters[1].gradient (bad): got none, expected a tensor");
    bad = make_parameter(DType::kF32, {1, 2, 3}, {3, 4, 5}, "bad");
    EXPECT_EQ(error_of([&] { optimiser.step(context_); }),
              step + ": parameters[1].value (bad): got [3], expected [2]");
    bad = make_parameter(DType::kF16, {1, 2}, {3, 4}, "bad");
    EXPECT_EQ(error_of([&] { optimiser.step(context_); }),
              step + ": parameters[1].value (bad): got dtype f16, expected f32");
    EXPECT_EQ(elements_of(good.value),
              (Values{1, 2}));  // the first in the list has not moved either
    // Nor have the running means or the count of steps: the next step is as a first one.
    bad = make_parameter(DType::kF32, {1, 2}, {3, 4}, "bad");
    optimiser.step(context_);
    Parameter fresh = make_parameter(DType::kF32, {1, 2}, {3, 4});
    Optimiser(context_, {&fresh}, {}).step(context_);
    EXPECT_EQ(elements_of(good.value), elements_of(fresh.value));
  }
};
LADON_FOR_EACH_CONTEXT(OptimiserErrors);

TEST_P(OptimiserErrors, Options) {
  const auto sgd = [&](const SgdOptions& options) {
    return error_of([&] { Sgd(context_, {}, options); });
  };
  const auto adamw = [&](const AdamWOptions& options) {
    return error_of([&] { AdamW(context_, {}, options); });
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
  Sgd plain(context_, {}, {});
  AdamW adaptive(context_, {}, {});
  EXPECT_EQ(error_of([&] { plain.set_learning_rate(-1); }), "Sgd::set_learning_rate: " + rate);
  EXPECT_EQ(error_of([&] { adaptive.set_learning_rate(-1); }), "AdamW::set_learning_rate: " + rate);
  EXPECT_EQ(plain.options().learning_rate, SgdOptions{}.learning_rate);
  EXPECT_EQ(adaptive.options().learning_rate, AdamWOptions{}.learning_rate);
  EXPECT_EQ(error_of([&] { clip_gradients(context_, {}, 0); }),
            "clip_gradients: max_norm: got 0, expected a positive number");
}

TEST_P(OptimiserErrors, Parameters) {
  Parameter good = make_parameter(DType::kF32, {1, 2}, {3, 4}, "good");
  Parameter bad = make_parameter(DType::kBF16, {1, 2}, {3, 4}, "bad");
  expect_refused({&good, nullptr}, "parameters[1]: got a null pointer, expected a parameter");
  expect_refused({&good, &bad, &good},
                 "parameters[2] (good): got the same parameter as parameters[0], expected each "
                 "once");
  bad.gradient = Tensor(context_, DType::kBF16, {2});
  expect_refused({&good, &bad}, "parameters[1].gradient (bad): got dtype bf16, expected f32");
  bad.gradient = Tensor(context_, DType::kF32, {2, 1});
  expect_refused({&good, &bad}, "parameters[1].gradient (bad): got [2, 1], expected [2]");
  bad.value = Tensor(context_, DType::kBool, {2});
  expect_refused({&good, &bad},
                 "parameters[1].value (bad): got dtype bool, expected f64, f32, f16 or bf16");
  Parameter nameless;
  expect_refused({&nameless}, "parameters[0].value: got none, expected a tensor");
  EXPECT_EQ(elements_of(good.gradient), (Values{3, 4}));  // not clipped before the bad one was seen
}

TEST_P(OptimiserErrors, Steps) {
  expect_steps_to_refuse<Sgd>("Sgd::step");
  expect_steps_to_refuse<AdamW>("AdamW::step");
}

TEST_P(OptimiserErrors, RestoredStates) {
  Parameter weight = make_parameter(DType::kBF16, {1, 2}, {3, 4});
  AdamW optimiser(context_, {&weight}, {});
  optimiser.step(context_);
  const auto moments = [&] {
    std::vector<AdamW::Moments> all;
    for (const AdamW::State& state : optimiser.states()) {
      all.push_back({state.first.clone(), state.second.clone(), state.master.clone()});
    }
    return all;
  };
  EXPECT_EQ(error_of([&] { optimiser.restore(-1, moments()); }),
            "AdamW::restore: steps: got -1, expected 0 or more");
  EXPECT_EQ(error_of([&] { optimiser.restore(1, {}); }),
            "AdamW::restore: moments: got 0 of them, expected one for each of 1 parameters");
  std::vector<AdamW::Moments> wrong = moments();
  wrong[0].second = Tensor(context_, DType::kF32, {3});
  EXPECT_EQ(error_of([&] { optimiser.restore(1, std::move(wrong)); }),
            "AdamW::restore: moments[0].second: got f32 [3], expected f32 [2]");
  EXPECT_EQ(optimiser.steps_taken(), 1);
  // Two steps from a state are the same two steps from where it was taken.
  const std::vector<double> start = elements_of(weight.value);
  std::vector<AdamW::Moments> taken = moments();
  optimiser.step(context_);
  const std::vector<double> once = elements_of(weight.value);
  EXPECT_NE(once, start);
  weight.value = there(Tensor::from_values(DType::kBF16, {2}, start));
  optimiser.restore(1, std::move(taken));
  optimiser.step(context_);
  EXPECT_EQ(elements_of(weight.value), once);
  EXPECT_EQ(optimiser.steps_taken(), 2);
}

}  // namespace
}  // namespace ladon
