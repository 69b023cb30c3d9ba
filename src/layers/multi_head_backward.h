// Backward of the heads of MultiHeadAttention: from the attended values to the inputs.
#pragma once

#include <span>

#include "layers/layer_output.h"
#include "layers/multi_head.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon::multi_head {

/// Sums the gradients of inputs and parameters, all but those of the output projection.
class HeadsBackward {
 public:
  /// `layer` is that of `heads`. Gradients of inputs go to `gradients`, in `dtype` where those are
  /// made; they are written last.
  HeadsBackward(const Context& context, AttentionLayer& layer, const LayerHeads& heads,
                const Saved& saved, DType dtype, InputGradientOutputs& gradients);

  void run(const Tensor& dattended);

  PendingGradients& pending() { return pending_; }

 private:
  /// The gradient of an input, which is the sum of these terms.
  struct InputGradient {
    LayerOutput& output;
    const Tensor& input;
    std::span<const GradientTerm> terms;
  };

  GradientTerm term(const Tensor& dy, const LinearIndex& linear) const;
  void write_input_gradients(std::span<const InputGradient> gradients) const;
  WeightGradient weight_gradient(const Tensor& dy, const LinearIndex& linear, const InputRows& x);
  void norm_backward(Tensor& dheads, const LinearIndex& linear, int norm, const ConstTensorView& x);
  void attention_back(const Tensor& dattended);
  void one_position_back(const Tensor& dattended);

  const Context& context_;
  const LayerHeads heads_;
  const Saved& saved_;
  Steps steps_;
  PendingGradients pending_;
  const DType dtype_;
  InputGradientOutputs& gradients_;
};

}  // namespace ladon::multi_head
