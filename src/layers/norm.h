// RMS norm over the last dimension: y = x * (weight + offset) / sqrt(mean(x^2) + epsilon), or layer
// norm, which is that of x less its mean.
#pragma once

#include "ladon/context.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// A norm's parameters other than its weight; most have an epsilon alone.
struct NormConstants {
  // NOLINTNEXTLINE(google-explicit-constructor)
  NormConstants(double the_epsilon, double the_offset = 0, bool is_centered = false)
      : epsilon(the_epsilon), weight_offset(the_offset), centered(is_centered) {}

  double epsilon;
  double weight_offset;  // added to the weight
  bool centered;         // layer norm
};

/// x and y are contiguous [..., dim], or [rows, dim] with any row stride; y may be x. weight is
/// [dim], or [heads, dim] where every heads-th row has the same. Rows are independent: their bits
/// depend on nothing else.
void rms_norm(const Context& context, const ConstTensorView& x, const ConstTensorView& weight,
              const NormConstants& constants, const TensorView& y);

/// Writes dx (strided as x may be; may be dy) and adds to dweight (f64 where x is, else f32).
void rms_norm_backward(const Context& context, const ConstTensorView& x,
                       const ConstTensorView& weight, const NormConstants& constants,
                       const ConstTensorView& dy, const TensorView& dx, const TensorView& dweight);

}  // namespace ladon
