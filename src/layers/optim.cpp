// The optimisers. Every step first checks all parameters, then walks each weight once.
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
#include "core/fail.h"

namespace ladon {
namespace {

/// Of the arithmetic, of the gradient and of what an optimiser keeps.
constexpr DType compute_dtype(DType weight) noexcept {
  return weight == DType::kF64 ? DType::kF64 : DType::kF32;
}

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

void check_value(std::string_view operation, std::size_t index, const Parameter& parameter) {
  const std::string name = argument_name(index, ".value", parameter.name);
  check_present(operation, {name, parameter.value});
  check_float(operation, {name, parameter.value});
}

void check_gradient(std::string_view operation, std::size_t index, const Parameter& parameter) {
  const std::string name = argument_name(index, ".gradient", parameter.name);
  const NamedView gradient{name, parameter.gradient};
  check_present(operation, gradient);
  check_dtype(operation, gradient, compute_dtype(parameter.value.dtype()));
  check_shape(operation, gradient, parameter.value.shape());
}

/// What a constructor asks. A gradient that is not there yet may come with the first backward().
void check_parameters(std::string_view operation, std::span<Parameter* const> parameters) {
  check_distinct(operation, parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check_value(operation, i, *parameters[i]);
    if (!parameters[i]->gradient.view().absent()) check_gradient(operation, i, *parameters[i]);
  }
}

/// What a step asks: the weights that the state was made for, and a gradient for each.
template <class State>
void check_states(std::string_view operation, const std::vector<State>& states) {
  for (std::size_t i = 0; i < states.size(); ++i) {
    const Parameter& parameter = *states[i].parameter;
    const std::string name = argument_name(i, ".value", parameter.name);
    const NamedView value{name, parameter.value};
    check_present(operation, value);
    check_dtype(operation, value, states[i].dtype);
    check_shape(operation, value, states[i].shape);
    check_gradient(operation, i, parameter);
  }
}

// ---- the walk over a weight ---------------------------------------------------------------------

template <class Weight>
using ComputeOf = std::conditional_t<std::is_same_v<Weight, double>, double, float>;

constexpr bool needs_master(DType weight) noexcept {
  return weight == DType::kF16 || weight == DType::kBF16;
}

/// An option in the type of the arithmetic. Saturates: an infinite factor would turn zeros to NaN.
template <class Compute>
Compute narrow(double value) noexcept {
  constexpr double kLargest = static_cast<double>(std::numeric_limits<Compute>::max());
  return static_cast<Compute>(std::min(value, kLargest));
}

/// Calls function<Weight>() with the C++ type of a floating dtype.
template <class Function>
void with_weight_type(DType dtype, const Function& function) {
  switch (dtype) {
    case DType::kF64: function.template operator()<double>(); return;
    case DType::kF32: function.template operator()<float>(); return;
    case DType::kF16: function.template operator()<float16>(); return;
    case DType::kBF16: function.template operator()<bfloat16>(); return;
    default: return;  // refused by the constructors
  }
}

/// weight = rule(i, weight, gradient) for every element i, by way of the master copy where the
/// weight has one.
template <class Weight, class Rule>
void update(Parameter& parameter, Tensor& master_tensor, const Rule& rule) {
  using Compute = ComputeOf<Weight>;
  Weight* const value = parameter.value.data_as<Weight>();
  const Compute* const gradient = parameter.gradient.data_as<Compute>();
  const std::int64_t count = parameter.num_elements();
  if constexpr (needs_master(dtype_of<Weight>)) {
    Compute* const master = master_tensor.data_as<Compute>();
    for (std::int64_t i = 0; i < count; ++i) {
      // A weight that is not its master rounded was set by someone else (a checkpoint was loaded):
      // it counts, not the master.
      const bool is_ours = Weight(master[i]).bits == value[i].bits;
      const Compute weight = is_ours ? master[i] : static_cast<Compute>(value[i]);
      master[i] = rule(i, weight, gradient[i]);
      value[i] = Weight(master[i]);
    }
  } else {
    for (std::int64_t i = 0; i < count; ++i) value[i] = rule(i, value[i], gradient[i]);
  }
}

/// What both optimisers keep of a parameter; each adds its own running means.
template <class State>
State make_state(Parameter* parameter) {
  State state;
  state.parameter = parameter;
  state.dtype = parameter->value.dtype();
  state.shape = parameter->value.shape();
  if (needs_master(state.dtype)) state.master = Tensor::copy_of(parameter->value, DType::kF32);
  return state;
}

}  // namespace

// ---- SGD ----------------------------------------------------------------------------------------

Sgd::Sgd(std::vector<Parameter*> parameters, const SgdOptions& options) : options_(options) {
  check_learning_rate("Sgd", options.learning_rate);
  check_decay_rate("Sgd", "momentum", options.momentum);
  check_weight_decay("Sgd", options.weight_decay);
  check_parameters("Sgd", parameters);
  states_.reserve(parameters.size());
  for (Parameter* const parameter : parameters) {
    State state = make_state<State>(parameter);
    if (options.momentum != 0) state.velocity = Tensor(compute_dtype(state.dtype), state.shape);
    states_.push_back(std::move(state));
  }
}

void Sgd::set_learning_rate(double learning_rate) {
  check_learning_rate("Sgd::set_learning_rate", learning_rate);
  options_.learning_rate = learning_rate;
}

void Sgd::step() {
  check_states("Sgd::step", states_);
  for (State& state : states_) {
    with_weight_type(state.dtype, [&]<class Weight>() {
      using Compute = ComputeOf<Weight>;
      const auto rate = narrow<Compute>(options_.learning_rate);
      const auto momentum = narrow<Compute>(options_.momentum);
      const auto decay = narrow<Compute>(options_.weight_decay);
      if (options_.momentum == 0) {
        update<Weight>(*state.parameter, state.master,
                       [=](std::int64_t, Compute weight, Compute gradient) {
                         return weight - rate * (gradient + decay * weight);
                       });
        return;
      }
      Compute* const velocity = state.velocity.template data_as<Compute>();
      update<Weight>(*state.parameter, state.master,
                     [=](std::int64_t i, Compute weight, Compute gradient) {
                       velocity[i] = momentum * velocity[i] + (gradient + decay * weight);
                       return weight - rate * velocity[i];
                     });
    });
  }
}

// ---- AdamW --------------------------------------------------------------------------------------

namespace {

/// What all elements of one step share.
template <class Compute>
struct AdamWStep {
  AdamWStep(const AdamWOptions& options, std::int64_t step)
      : beta1(beta(options.beta1)),
        beta2(beta(options.beta2)),
        // By the rounded betas, which are those that the running means see: with 0.999 itself, the
        // f32 means and their corrections would drift apart by 1e-5.
        rate(narrow<Compute>(options.learning_rate / correction(beta1, step))),
        root_correction(narrow<Compute>(1 / std::sqrt(correction(beta2, step)))),
        // Where it would vanish in f32, a gradient of zeros would divide 0 by 0.
        epsilon(std::max(narrow<Compute>(options.epsilon), std::numeric_limits<Compute>::min())),
        decay(narrow<Compute>(options.learning_rate * options.weight_decay)) {}

  /// Rounded, but below 1: at 1 the means would stay 0 and their correction be infinite.
  static Compute beta(double value) {
    constexpr Compute kBelowOne = 1 - std::numeric_limits<Compute>::epsilon() / 2;
    return std::min(static_cast<Compute>(value), kBelowOne);
  }

  static double correction(Compute beta, std::int64_t step) {
    return 1 - std::pow(static_cast<double>(beta), static_cast<double>(step));
  }

  Compute beta1;
  Compute beta2;
  Compute rate;             // learning rate over the first moment's correction
  Compute root_correction;  // of the second moment, inverted
  Compute epsilon;
  Compute decay;
};

}  // namespace

AdamW::AdamW(std::vector<Parameter*> parameters, const AdamWOptions& options) : options_(options) {
  check_learning_rate("AdamW", options.learning_rate);
  check_decay_rate("AdamW", "beta1", options.beta1);
  check_decay_rate("AdamW", "beta2", options.beta2);
  if (!std::isfinite(options.epsilon) || !(options.epsilon > 0)) {
    fail("AdamW", "epsilon",
         "got " + text_of(options.epsilon) + ", expected a positive finite number");
  }
  check_weight_decay("AdamW", options.weight_decay);
  check_parameters("AdamW", parameters);
  states_.reserve(parameters.size());
  for (Parameter* const parameter : parameters) {
    State state = make_state<State>(parameter);
    state.first = Tensor(compute_dtype(state.dtype), state.shape);
    state.second = Tensor(compute_dtype(state.dtype), state.shape);
    states_.push_back(std::move(state));
  }
}

void AdamW::set_learning_rate(double learning_rate) {
  check_learning_rate("AdamW::set_learning_rate", learning_rate);
  options_.learning_rate = learning_rate;
}

void AdamW::step() {
  check_states("AdamW::step", states_);
  ++steps_;
  for (State& state : states_) {
    with_weight_type(state.dtype, [&]<class Weight>() {
      using Compute = ComputeOf<Weight>;
      const AdamWStep<Compute> step(options_, steps_);
      Compute* const first = state.first.template data_as<Compute>();
      Compute* const second = state.second.template data_as<Compute>();
      update<Weight>(
          *state.parameter, state.master, [=](std::int64_t i, Compute weight, Compute gradient) {
            first[i] = step.beta1 * first[i] + (1 - step.beta1) * gradient;
            second[i] = step.beta2 * second[i] + (1 - step.beta2) * (gradient * gradient);
            const Compute spread = std::sqrt(second[i]) * step.root_correction;
            // Decay and step in one sum: a decay below half a unit of the weight still
            // counts where the two together are not.
            return weight - (step.decay * weight + step.rate * first[i] / (spread + step.epsilon));
          });
    });
  }
}

// ---- clipping -----------------------------------------------------------------------------------

namespace {

/// function(gradient) for every element of every gradient, in order.
template <class Function>
void for_each_gradient(std::span<Parameter* const> parameters, const Function& function) {
  const auto walk = [&function](auto* gradient, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) function(gradient[i]);
  };
  for (Parameter* const parameter : parameters) {
    Tensor& gradient = parameter->gradient;
    if (gradient.dtype() == DType::kF64) {
      walk(gradient.data_as<double>(), gradient.num_elements());
    } else {
      walk(gradient.data_as<float>(), gradient.num_elements());
    }
  }
}

double norm_of(std::span<Parameter* const> parameters) {
  double sum = 0;
  for_each_gradient(parameters, [&sum](const auto& gradient) {
    const auto wide = static_cast<double>(gradient);
    sum += wide * wide;
  });
  // Squares of f32 numbers cannot leave double's range, those of f64 numbers can.
  constexpr double kSafeLow = 1e-280;
  if (std::isnan(sum) || (std::isfinite(sum) && sum > kSafeLow)) return std::sqrt(sum);
  double largest = 0;
  for_each_gradient(parameters, [&largest](const auto& gradient) {
    largest = std::max(largest, std::abs(static_cast<double>(gradient)));
  });
  if (largest == 0 || std::isinf(largest)) return largest;
  const int exponent = std::ilogb(largest);
  double scaled_sum = 0;
  for_each_gradient(parameters, [&scaled_sum, exponent](const auto& gradient) {
    const double scaled = std::scalbn(static_cast<double>(gradient), -exponent);
    scaled_sum += scaled * scaled;
  });
  return std::scalbn(std::sqrt(scaled_sum), exponent);
}

}  // namespace

double clip_gradients(std::span<Parameter* const> parameters, double max_norm) {
  // Infinity is a way to ask for the norm alone.
  if (!(max_norm > 0)) {
    fail("clip_gradients", "max_norm", "got " + text_of(max_norm) + ", expected a positive number");
  }
  check_distinct("clip_gradients", parameters);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    check_value("clip_gradients", i, *parameters[i]);
    check_gradient("clip_gradients", i, *parameters[i]);
  }
  const double norm = norm_of(parameters);
  if (!std::isfinite(norm) || norm <= max_norm) return norm;
  const double factor = max_norm / norm;
  for_each_gradient(parameters, [factor]<class Gradient>(Gradient& gradient) {
    gradient = static_cast<Gradient>(static_cast<double>(gradient) * factor);
  });
  return norm;
}

}  // namespace ladon
