// The optimisers' steps, one element at a time.

#include <cmath>
#include <cstdint>

#include "core/float_type.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

/// weight = rule(i, weight, gradient) for every element i, by way of the master copy where the
/// weight has one.
template <class Weight, class Rule>
void update(const OptimiserOperands& operands, const Rule& rule) {
  using Compute = ComputeOf<Weight>;
  auto* const value = static_cast<Weight*>(operands.value);
  const auto* const gradient = static_cast<const Compute*>(operands.gradient);
  if constexpr (sizeof(Weight) == 2) {
    auto* const master = static_cast<Compute*>(operands.master);
    for (std::int64_t i = 0; i < operands.count; ++i) {
      // A weight that is not its master rounded was set from outside (a checkpoint was loaded):
      // it counts, not the master.
      const bool is_ours = Weight(master[i]).bits == value[i].bits;
      const Compute weight = is_ours ? master[i] : static_cast<Compute>(value[i]);
      master[i] = rule(i, weight, gradient[i]);
      value[i] = Weight(master[i]);
    }
  } else {
    for (std::int64_t i = 0; i < operands.count; ++i) value[i] = rule(i, value[i], gradient[i]);
  }
}

}  // namespace

void ReferenceBackend::sgd_step(const SgdParams& params) {
  with_float_type(params.operands.dtype, [&]<class Weight>() {
    using Compute = ComputeOf<Weight>;
    const auto rate = static_cast<Compute>(params.learning_rate);
    const auto momentum = static_cast<Compute>(params.momentum);
    const auto decay = static_cast<Compute>(params.weight_decay);
    auto* const velocity = static_cast<Compute*>(params.velocity);
    update<Weight>(params.operands, [=](std::int64_t i, Compute weight, Compute gradient) {
      Compute step = gradient + decay * weight;
      if (velocity != nullptr) step = velocity[i] = momentum * velocity[i] + step;
      return weight - rate * step;
    });
  });
}

void ReferenceBackend::adamw_step(const AdamWParams& params) {
  with_float_type(params.operands.dtype, [&]<class Weight>() {
    using Compute = ComputeOf<Weight>;
    const auto beta1 = static_cast<Compute>(params.beta1);
    const auto beta2 = static_cast<Compute>(params.beta2);
    const auto rate = static_cast<Compute>(params.rate);
    const auto root_correction = static_cast<Compute>(params.root_correction);
    const auto epsilon = static_cast<Compute>(params.epsilon);
    const auto decay = static_cast<Compute>(params.decay);
    auto* const first = static_cast<Compute*>(params.first);
    auto* const second = static_cast<Compute*>(params.second);
    update<Weight>(params.operands, [=](std::int64_t i, Compute weight, Compute gradient) {
      first[i] = beta1 * first[i] + (1 - beta1) * gradient;
      second[i] = beta2 * second[i] + (1 - beta2) * (gradient * gradient);
      const Compute spread = std::sqrt(second[i]) * root_correction;
      // Decay and step in one sum: a decay below half a unit of the weight still counts where the
      // two together are not.
      return weight - (decay * weight + rate * first[i] / (spread + epsilon));
    });
  });
}

}  // namespace ladon::reference
