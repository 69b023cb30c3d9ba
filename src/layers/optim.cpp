// The optimisers. Every step first checks all parameters, then hands each to the backend.
//
// f64 weights are updated in double, all others in f32; what does not change within a step (bias
// corrections, the rate) is worked out in double and rounded once.
#include "ladon/optim.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/context_impl.h"
#include "core/fail.h"

namespace ladon {
namespace {

// ---- checks -------------------------------------------------------------------------------------

void check_learning_rate(std::string_view operation, double value) {
  if (std::isfinite(value) && value >= 0) return;  // schedules may end at 0
  fail(operation, "learning_rate", "got " + text_of(value) + ", expected 0 or a positive number");
}

/// momentum and the betas.
void check_decay_rate(std::string_view operation, std::string_view argument, double value) {
  if (value >= 0 && value < 1) return;
  fail(operation, argument, "got " + text_of(value) + ", expected a number in [0, 1)");
}

void check_weight_decay(std::string_view operation, double value) {
  if (std::isfinite(value) && value >= 0) return;
  fail(operation, "weight_decay",
       "got " + text_of(value) + ", expected a finite number of 0 or more");
}

/// "parameters[2].gradient (q_proj.weight)": how messages call a parameter or a part of it.
std::string argument_name(std::size_t index, std::string_view part, const std::string& name) {
  std::string text = "parameters[" + std::to_string(index) + "]";
  text.append(part);
  if (!name.empty()) text.append(" (").append(name).append(")");
  return text;
}

void check_distinct(std::string_view operation, std::span<Parameter* const> parameters) {
  std::unordered_map<const Parameter*, std::size_t> seen;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i] == nullptr) {
      fail(operation, argument_name(i, "", ""), "got a null pointer, expected a parameter");
    }
    const auto [first, is_new] = seen.emplace(parameters[i], i);
    if (!is_new) {
      fail(operation, argument_name(i, "", parameters[i]->name),
           "got the same parameter as parameters[" + std::to_string(first->second) +
               "], expected each once");
    }
  }
}

void check_value(const Operation& operation, std::size_t index, const Parameter& parameter) {
  const std::string name = argument_name(index, ".value", parameter.name);
  check_present(operation, {name, parameter.value});
  check_device(operation, {name, parameter.value});
  check_float(operation, {name, parameter.value});
}

void check_gradient(const Operation& operation, std::size_t index, const Parameter& parameter) {
  const std::string name = argument_name(index, ".gradient", parameter.name);
  const NamedView gradient{name, parameter.gradient};
  check_present(operation, gradient);
  check_device(operation, gradient);
  check_dtype(operation, gradient, compute_dtype(parameter.value.dtype()));
  check_shape(operation, gradient, parameter.value.shape());
}

/// What a constructor requires. A gradient that is not there yet may come with the first
/// backward().
void check_parameters(const Operation& operation, std::span<Parameter* const> parameters) {
  check_distinct(operation, parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check_value(operation, i, *parameters[i]);
    if (!parameters[i]->gradient.view().absent()) check_gradient(operation, i, *parameters[i]);
  }
}

/// What the optimiser keeps of a parameter must be where the parameter is now.
template <class State>
void check_kept(const Operation& operation, const State& state) {
  const auto check = [&](const Tensor& kept) {
    if (kept.rank() != 0) check_device(operation, "optimiser", kept.device());
  };
  check(state.master);
  if constexpr (std::is_base_of_v<AdamW::Moments, State>) {
    check(state.first);
    check(state.second);
  } else {
    check(state.velocity);
  }
}

/// What a step requires: the weights that the state was made for, and a gradient for each.
template <class State>
void check_states(const Operation& operation, const std::vector<State>& states) {
  for (std::size_t i = 0; i < states.size(); ++i) {
    const Parameter& parameter = *states[i].parameter;
    const std::string name = argument_name(i, ".value", parameter.name);
    const NamedView value{name, parameter.value};
    check_present(operation, value);
    check_device(operation, value);
    check_dtype(operation, value, states[i].dtype);
    check_shape(operation, value, states[i].shape);
    check_gradient(operation, i, parameter);
    check_kept(operation, states[i]);
  }
}

// ---- what both optimisers share -----------------------------------------------------------------

constexpr bool needs_master(DType weight) noexcept {
  return weight == DType::kF16 || weight == DType::kBF16;
}

/// An option as it is in the type of the arithmetic. Saturates: an infinite factor would turn zeros
/// to NaN.
double narrow(double value, DType weight) noexcept {
  if (weight == DType::kF64) return std::min(value, std::numeric_limits<double>::max());
  constexpr double kLargest = static_cast<double>(std::numeric_limits<float>::max());
  return static_cast<double>(static_cast<float>(std::min(value, kLargest)));
}

/// What both optimisers keep of a parameter; each adds its own running means.
template <class State>
State make_state(const Context& context, Parameter* parameter) {
  State state;
  state.parameter = parameter;
  state.dtype = parameter->value.dtype();
  state.shape = parameter->value.shape();
  if (needs_master(state.dtype)) {
    state.master = Tensor::copy_of(context, parameter->value, DType::kF32);
  }
  return state;
}

/// For a step that is about to be taken.
template <class State>
OptimiserOperands operands_of(State& state) {
  Parameter& parameter = *state.parameter;
  ++parameter.generation;
  return {.count = parameter.num_elements(),
          .value = parameter.value.data(),
          .dtype = state.dtype,
          .gradient = parameter.gradient.data(),
          .master = state.master.data()};
}

}  // namespace

// ---- SGD ----------------------------------------------------------------------------------------

Sgd::Sgd(const Context& context, std::vector<Parameter*> parameters, const SgdOptions& options)
    : options_(options) {
  check_learning_rate("Sgd", options.learning_rate);
  check_decay_rate("Sgd", "momentum", options.momentum);
  check_weight_decay("Sgd", options.weight_decay);
  check_parameters(Operation("Sgd", context), parameters);
  states_.reserve(parameters.size());
  for (Parameter* const parameter : parameters) {
    State state = make_state<State>(context, parameter);
    if (options.momentum != 0) {
      state.velocity = Tensor(context, compute_dtype(state.dtype), state.shape);
    }
    states_.push_back(std::move(state));
  }
}

void Sgd::set_learning_rate(double learning_rate) {
  check_learning_rate("Sgd::set_learning_rate", learning_rate);
  options_.learning_rate = learning_rate;
}

void Sgd::step(const Context& context) {
  check_states(Operation("Sgd::step", context), states_);
  for (State& state : states_) {
    backend_of(context).sgd_step({.operands = operands_of(state),
                                  .velocity = state.velocity.data(),
                                  .learning_rate = narrow(options_.learning_rate, state.dtype),
                                  .momentum = narrow(options_.momentum, state.dtype),
                                  .weight_decay = narrow(options_.weight_decay, state.dtype)});
  }
}

// ---- AdamW --------------------------------------------------------------------------------------

namespace {

/// What all elements of one step share, in a weight's type of arithmetic.
AdamWParams step_constants(const AdamWOptions& options, std::int64_t step, DType weight) {
  const auto epsilon_below_one = weight == DType::kF64
                                     ? std::numeric_limits<double>::epsilon()
                                     : static_cast<double>(std::numeric_limits<float>::epsilon());
  const double smallest = weight == DType::kF64
                              ? std::numeric_limits<double>::min()
                              : static_cast<double>(std::numeric_limits<float>::min());
  // Rounded, but below 1: at 1 the means would stay 0 and their correction be infinite.
  const auto beta = [&](double value) {
    return std::min(narrow(value, weight), 1 - epsilon_below_one / 2);
  };
  // By the rounded betas, which are those that the running means see: with 0.999 itself, the f32
  // means and their corrections would drift apart by 1e-5.
  const auto correction = [&](double rounded) {
    return 1 - std::pow(rounded, static_cast<double>(step));
  };
  AdamWParams params;
  params.beta1 = beta(options.beta1);
  params.beta2 = beta(options.beta2);
  params.rate = narrow(options.learning_rate / correction(params.beta1), weight);
  params.root_correction = narrow(1 / std::sqrt(correction(params.beta2)), weight);
  // Where it would vanish in f32, a gradient of zeros would divide 0 by 0.
  params.epsilon = std::max(narrow(options.epsilon, weight), smallest);
  params.decay = narrow(options.learning_rate * options.weight_decay, weight);
  return params;
}

}  // namespace

AdamW::AdamW(const Context& context, std::vector<Parameter*> parameters,
             const AdamWOptions& options)
    : options_(options) {
  check_learning_rate("AdamW", options.learning_rate);
  check_decay_rate("AdamW", "beta1", options.beta1);
  check_decay_rate("AdamW", "beta2", options.beta2);
  if (!std::isfinite(options.epsilon) || !(options.epsilon > 0)) {
    fail("AdamW", "epsilon",
         "got " + text_of(options.epsilon) + ", expected a positive finite number");
  }
  check_weight_decay("AdamW", options.weight_decay);
  check_parameters(Operation("AdamW", context), parameters);
  states_.reserve(parameters.size());
  for (Parameter* const parameter : parameters) {
    State state = make_state<State>(context, parameter);
    state.first = Tensor(context, compute_dtype(state.dtype), state.shape);
    state.second = Tensor(context, compute_dtype(state.dtype), state.shape);
    states_.push_back(std::move(state));
  }
}

void AdamW::set_learning_rate(double learning_rate) {
  check_learning_rate("AdamW::set_learning_rate", learning_rate);
  options_.learning_rate = learning_rate;
}

void AdamW::step(const Context& context) {
  check_states(Operation("AdamW::step", context), states_);
  ++steps_;
  for (State& state : states_) {
    AdamWParams params = step_constants(options_, steps_, state.dtype);
    params.operands = operands_of(state);
    params.first = state.first.data();
    params.second = state.second.data();
    backend_of(context).adamw_step(params);
  }
}

void AdamW::restore(std::int64_t steps, std::vector<Moments> moments) {
  constexpr std::string_view kOperation = "AdamW::restore";
  if (steps < 0) {
    fail(kOperation, "steps", "got " + std::to_string(steps) + ", expected 0 or more");
  }
  if (moments.size() != states_.size()) {
    fail(kOperation, "moments",
         "got " + std::to_string(moments.size()) + " of them, expected one for each of " +
             std::to_string(states_.size()) + " parameters");
  }
  for (std::size_t i = 0; i < moments.size(); ++i) {
    const auto check = [&](std::string_view part, const Tensor& got, const Tensor& expected) {
      const std::string name = "moments[" + std::to_string(i) + "]" + std::string(part);
      const auto text = [](const Tensor& tensor) {
        return name_of(tensor.dtype()) + (" " + tensor.shape().to_string());
      };
      if (got.dtype() != expected.dtype() || !(got.shape() == expected.shape())) {
        fail(kOperation, name, "got " + text(got) + ", expected " + text(expected));
      }
      check_device(Operation(kOperation, expected.device()), name, got.device());
    };
    check(".first", moments[i].first, states_[i].first);
    check(".second", moments[i].second, states_[i].second);
    check(".master", moments[i].master, states_[i].master);
  }
  for (std::size_t i = 0; i < moments.size(); ++i) {
    static_cast<Moments&>(states_[i]) = std::move(moments[i]);
  }
  steps_ = steps;
}

// ---- clipping -----------------------------------------------------------------------------------

namespace {

double norm_of(Backend& backend, std::span<const FloatArray> gradients) {
  const Magnitude plain = backend.magnitude(gradients, 0);
  // Squares of f32 numbers cannot leave double's range, those of f64 numbers can.
  constexpr double kSafeLow = 1e-280;
  const double sum = plain.sum_of_squares;
  if (std::isnan(sum) || (std::isfinite(sum) && sum > kSafeLow)) return std::sqrt(sum);
  if (plain.largest == 0 || std::isinf(plain.largest)) return plain.largest;
  const int exponent = std::ilogb(plain.largest);
  return std::scalbn(std::sqrt(backend.magnitude(gradients, exponent).sum_of_squares), exponent);
}

}  // namespace

double clip_gradients(const Context& context, std::span<Parameter* const> parameters,
                      double max_norm) {
  const Operation operation("clip_gradients", context);
  // With infinity, the norm alone is computed.
  if (!(max_norm > 0)) {
    fail(operation, "max_norm", "got " + text_of(max_norm) + ", expected a positive number");
  }
  check_distinct(operation, parameters);
  std::vector<FloatArray> gradients;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check_value(operation, i, *parameters[i]);
    check_gradient(operation, i, *parameters[i]);
    Tensor& gradient = parameters[i]->gradient;
    gradients.push_back({gradient.data(), gradient.dtype(), gradient.num_elements()});
  }
  Backend& backend = backend_of(context);
  const double norm = norm_of(backend, gradients);
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  for (const FloatArray& gradient : gradients) backend.scale(gradient, max_norm / norm);
  return norm;
}

}  // namespace ladon
