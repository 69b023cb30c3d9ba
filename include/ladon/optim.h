// Optimisers over layers' parameters: SGD and AdamW, and gradient clipping.
//
// 16-bit weights are trained through f32 master copies, which the optimiser keeps: steps smaller
// than a 16-bit unit add up instead of vanishing. A weight that is set from outside between steps
// is continued from there. What an optimiser keeps is on the parameters' device; calls take a
// Context of that device.
//
// A Parameter object must keep its address as long as an optimiser refers to it (layers keep theirs
// in place; moving or assigning the layer object ends that), and its dtype, shape and device. Its
// gradient may come after the optimiser, but before the first step. A call that throws has changed
// nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/parameter.h"
#include "ladon/tensor.h"

namespace ladon {

struct SgdOptions {
  double learning_rate = 0.01;  // 0 or more
  double momentum = 0;          // in [0, 1); 0 is plain SGD
  double weight_decay = 0;      // added to the gradient times the weight; 0 or more
};

/// velocity = momentum * velocity + gradient + weight_decay * weight;
/// weight -= learning_rate * velocity.
class LADON_API Sgd {
 public:
  Sgd(const Context& context, std::vector<Parameter*> parameters, const SgdOptions& options);

  /// One step from the gradients that are there; does not clear them.
  void step(const Context& context);
  void set_learning_rate(double learning_rate);
  const SgdOptions& options() const noexcept { return options_; }

 private:
  struct State {
    Parameter* parameter = nullptr;
    DType dtype{};  // of the weight, when the optimiser was made
    Dims shape{};
    Tensor velocity{};  // empty without momentum
    Tensor master{};    // empty unless the weight is 16-bit
  };
  SgdOptions options_;
  std::vector<State> states_;
};

struct AdamWOptions {
  double learning_rate = 1e-3;  // 0 or more
  double beta1 = 0.9;           // both in [0, 1)
  double beta2 = 0.999;
  double epsilon = 1e-8;       // positive
  double weight_decay = 0.01;  // decoupled: weight -= learning_rate * weight_decay * weight
};

/// Loshchilov, Hutter: "Decoupled weight decay regularization", with bias-corrected moments.
class LADON_API AdamW {
 public:
  AdamW(const Context& context, std::vector<Parameter*> parameters, const AdamWOptions& options);

  /// One step from the gradients that are there; does not clear them.
  void step(const Context& context);
  void set_learning_rate(double learning_rate);
  const AdamWOptions& options() const noexcept { return options_; }
  std::int64_t steps_taken() const noexcept { return steps_; }

  /// What it keeps of one parameter: with the weights, all that the next steps depend on.
  struct Moments {
    Tensor first{};   // running mean of the gradient
    Tensor second{};  // running mean of its square
    Tensor master{};  // the f32 weight where the parameter's is 16-bit, else empty
  };
  struct State : Moments {
    Parameter* parameter = nullptr;
    DType dtype{};  // of the weight, when the optimiser was made
    Dims shape{};
  };
  /// One for each parameter, in their order.
  std::span<const State> states() const noexcept { return states_; }
  /// Goes on as after that many steps: one entry for each parameter, of the same dtypes and shapes
  /// and on the same device as those that are there.
  void restore(std::int64_t steps, std::vector<Moments> moments);

 private:
  AdamWOptions options_;
  std::int64_t steps_ = 0;
  std::vector<State> states_;
};

/// Scales all gradients so that their joint 2-norm is at most max_norm (positive; infinity to ask
/// for the norm alone), up to rounding. Returns the norm from before. A norm that is not finite
/// leaves the gradients as they are.
LADON_API double clip_gradients(const Context& context, std::span<Parameter* const> parameters,
                                double max_norm);

}  // namespace ladon
