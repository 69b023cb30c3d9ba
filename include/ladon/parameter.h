// Parameter: a weight that a layer owns, with its name and its gradient.
#pragma once

#include <cstdint>
#include <string>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/tensor.h"

namespace ladon {

/// `gradient` has value's shape and the precision that sums need: f64 for f64 weights, else f32.
/// backward() adds to it; zero_grad() clears it. Both are on the same device. A layer's parameters
/// have none (an absent tensor) until its first backward(): running a layer does not pay for
/// training it.
struct LADON_API Parameter {
  std::string name;  // as checkpoints call it: "q_proj.weight"
  Tensor value{};
  Tensor gradient{};
  /// How often the value has changed, by set_parameter() and optimisers; a program that writes to
  /// it itself counts on. A layer's backward() refuses what it saved with other weights.
  std::uint64_t generation = 0;

  /// Zeros of this dtype and shape on the host, and a zero gradient.
  static Parameter zeros(std::string name, DType dtype, const Dims& shape);
  /// The same without the gradient.
  static Parameter zeros_without_gradient(std::string name, DType dtype, const Dims& shape);
  /// Makes a zero gradient where there is none.
  void make_gradient(const Context& context);
  /// Clears the gradient, where there is one.
  void zero_gradient(const Context& context);
  /// A deep copy on the same device, or on the Context's.
  Parameter copy() const;
  Parameter to(const Context& context) const;
  std::int64_t num_elements() const noexcept { return value.num_elements(); }
};

}  // namespace ladon
