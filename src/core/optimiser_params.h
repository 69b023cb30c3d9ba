// One step of an optimiser over one parameter, as every backend sees it: plain data.
//
// f64 weights are updated in double, all others in f32. Numbers that all elements share are doubles
// that are exact in that type.
#pragma once

#include <cstdint>

#include "ladon/dtype.h"

namespace ladon {

/// What every optimiser reads and writes. Dense arrays of `count` elements.
struct OptimiserOperands {
  std::int64_t count = 0;
  void* value = nullptr;
  DType dtype = DType::kF32;       // of the value
  const void* gradient = nullptr;  // compute type
  /// The weight in f32, for 16-bit values; null otherwise. Where value is not master rounded, it
  /// was set from outside and counts instead.
  void* master = nullptr;
};

/// velocity = momentum * velocity + (gradient + weight_decay * weight);
/// weight -= learning_rate * velocity. Without momentum, velocity is null and not kept.
struct SgdParams {
  OptimiserOperands operands{};
  void* velocity = nullptr;
  double learning_rate = 0;
  double momentum = 0;
  double weight_decay = 0;
};

/// first = beta1 * first + (1 - beta1) * gradient; second = beta2 * second + (1 - beta2) *
/// gradient^2; weight -= decay * weight + rate * first / (sqrt(second) * root_correction +
/// epsilon).
struct AdamWParams {
  OptimiserOperands operands{};
  void* first = nullptr;
  void* second = nullptr;
  double beta1 = 0;
  double beta2 = 0;
  double rate = 0;             // learning rate over the first moment's bias correction
  double root_correction = 0;  // 1 / sqrt(the second moment's bias correction)
  double epsilon = 0;
  double decay = 0;  // learning rate * weight decay
};

}  // namespace ladon
