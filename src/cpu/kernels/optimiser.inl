// The optimisers' steps. The bound is memory: AdamW over bf16 weights reads 18 bytes per element
// (weight, gradient, two moments, master copy) and writes 14.
//
// Products are rounded before they are added (no fused multiply-add), so that all instruction sets
// give the same bits and a training run does not depend on the machine.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/convert.inl"

namespace ladon::cpu {
namespace {

/// Loads n elements, at most kLanes, and zeros: whole vectors directly, the last through a buffer.
template <class V>
inline V load_some(const typename V::Scalar* p, std::int64_t n) {
  if (n == V::kLanes) return load<V>(p);
  typename V::Scalar buffer[V::kLanes] = {};
  for (std::int64_t i = 0; i < n; ++i) buffer[i] = p[i];
  return load<V>(buffer);
}
template <class V>
inline void store_some(typename V::Scalar* p, V a, std::int64_t n) {
  if (n == V::kLanes) return store(p, a);
  typename V::Scalar buffer[V::kLanes];
  store(buffer, a);
  for (std::int64_t i = 0; i < n; ++i) p[i] = buffer[i];
}

/// Loads or stores n 16-bit elements, at most kLanes.
inline F32 load_narrow(const std::uint16_t* p, DType dtype, std::int64_t n) {
  std::uint16_t buffer[F32::kLanes] = {};
  if (n < F32::kLanes) {
    for (std::int64_t i = 0; i < n; ++i) buffer[i] = p[i];
    p = buffer;
  }
  return with_half_dtype(dtype, [p](auto stored) { return load_half<stored.kDType>(p); });
}
inline void store_narrow(std::uint16_t* p, F32 a, DType dtype, std::int64_t n) {
  std::uint16_t buffer[F32::kLanes];
  std::uint16_t* to = n < F32::kLanes ? buffer : p;
  with_half_dtype(dtype, [to, a](auto stored) { store_half<stored.kDType>(to, a); });
  for (std::int64_t i = 0; i < n && to != p; ++i) p[i] = buffer[i];
}

/// The weights of an optimiser's step in the compute type: the master copies where there are some.
template <class V>
class Weights {
 public:
  using Scalar = typename V::Scalar;

  explicit Weights(const OptimiserOperands& operands) : operands_(operands) {}

  V gradient(std::int64_t i, std::int64_t n) const {
    return load_some<V>(static_cast<const Scalar*>(operands_.gradient) + i, n);
  }

  V load_weight(std::int64_t i, std::int64_t n) const {
    if constexpr (sizeof(Scalar) == 4) {
      if (operands_.master != nullptr) {
        // A weight that differs from its rounded master was set from outside (a loaded checkpoint):
        // it replaces the master.
        const F32 master = load_some<F32>(static_cast<const float*>(operands_.master) + i, n);
        const F32 stored = load_narrow(narrow_value() + i, operands_.dtype, n);
        std::uint16_t rounded_master[F32::kLanes];
        store_narrow(rounded_master, master, operands_.dtype, F32::kLanes);
        const F32 expected = load_narrow(rounded_master, operands_.dtype, F32::kLanes);
        return select(identical(stored, expected), master, stored);
      }
    }
    return load_some<V>(static_cast<const Scalar*>(operands_.value) + i, n);
  }

  void store_weight(std::int64_t i, std::int64_t n, V weight) const {
    if constexpr (sizeof(Scalar) == 4) {
      if (operands_.master != nullptr) {
        store_some(static_cast<float*>(operands_.master) + i, weight, n);
        store_narrow(narrow_value() + i, weight, operands_.dtype, n);
        return;
      }
    }
    store_some(static_cast<Scalar*>(operands_.value) + i, weight, n);
  }

 private:
  std::uint16_t* narrow_value() const { return static_cast<std::uint16_t*>(operands_.value); }

  const OptimiserOperands& operands_;
};

/// Sets weight = rule(i, n, weight, gradient) for each vector of a range.
template <class V, class Rule>
inline void update_weights(const OptimiserOperands& operands, const ElementRange& range,
                           const Rule& rule) {
  const Weights<V> weights(operands);
  for (std::int64_t i = range.begin; i < range.end; i += V::kLanes) {
    const std::int64_t n = smaller(V::kLanes, range.end - i);
    weights.store_weight(i, n, rule(i, n, weights.load_weight(i, n), weights.gradient(i, n)));
  }
}

template <class V>
inline V constant(double value) {
  return broadcast<V>(static_cast<typename V::Scalar>(value));
}

template <class V>
void sgd_step(const SgdParams& params, const ElementRange& range, Scratch) {
  using Scalar = typename V::Scalar;
  auto* velocity = static_cast<Scalar*>(params.velocity);
  const V rate = constant<V>(params.learning_rate);
  const V momentum = constant<V>(params.momentum);
  const V decay = constant<V>(params.weight_decay);
  update_weights<V>(params.operands, range,
                    [&](std::int64_t i, std::int64_t n, V weight, V gradient) {
                      V step = gradient + rounded(decay * weight);
                      if (velocity != nullptr) {
                        step = rounded(momentum * load_some<V>(velocity + i, n)) + step;
                        store_some(velocity + i, step, n);
                      }
                      return weight - rounded(rate * step);
                    });
}

template <class V>
std::size_t sgd_step_scratch(const SgdParams&) {
  return 0;
}

template <class V>
void adamw_step(const AdamWParams& params, const ElementRange& range, Scratch) {
  using Scalar = typename V::Scalar;
  auto* first = static_cast<Scalar*>(params.first);
  auto* second = static_cast<Scalar*>(params.second);
  const V beta1 = constant<V>(params.beta1);
  const V beta2 = constant<V>(params.beta2);
  const V one_less_beta1 = broadcast<V>(1) - beta1;
  const V one_less_beta2 = broadcast<V>(1) - beta2;
  const V rate = constant<V>(params.rate);
  const V root_correction = constant<V>(params.root_correction);
  const V epsilon = constant<V>(params.epsilon);
  const V decay = constant<V>(params.decay);
  update_weights<V>(
      params.operands, range, [&](std::int64_t i, std::int64_t n, V weight, V gradient) {
        const V mean =
            rounded(beta1 * load_some<V>(first + i, n)) + rounded(one_less_beta1 * gradient);
        const V square = rounded(beta2 * load_some<V>(second + i, n)) +
                         rounded(one_less_beta2 * rounded(gradient * gradient));
        store_some(first + i, mean, n);
        store_some(second + i, square, n);
        const V spread = rounded(sqrt(square) * root_correction);
        // Decay and step are summed before they are subtracted: a decay below half a unit in the
        // last place of the weight still has an effect where the sum is above it.
        return weight - (rounded(decay * weight) + rounded(rate * mean) / (spread + epsilon));
      });
}

template <class V>
std::size_t adamw_step_scratch(const AdamWParams&) {
  return 0;
}

}  // namespace
}  // namespace ladon::cpu
