// Backward of the heads of MultiHeadAttention: from the attended values to the inputs.
#pragma once

#include <span>

#include "layers/multi_head.h"
#include "layers/pending_gradients.h"
#include "layers/projection.h"

namespace ladon::multi_head {

/// Sums the gradients of inputs and parameters, all but those of the output projection.
class HeadsBackward {
 public:
  /// `layer` is that of `heads`. Gradients of inputs get `dtype`.
  HeadsBackward(const Context& context, AttentionLayer& layer, const LayerHeads& heads,
                const Saved& saved, DType dtype);

  void run(const Tensor& dattended);

  /// Without a batch where the inputs had none; key and value are empty where the call did not give
  /// them.
  InputGradients& gradients() { return gradients_; }
  PendingGradients& pending() { return pending_; }

 private:
  GradientTerm term(const Tensor& dy, const LinearIndex& linear) const;
  Tensor input_gradient(const Tensor& input, std::span<const GradientTerm> terms) const;
  void weight_back(const Tensor& dy, const LinearIndex& linear, const ConstTensorView& x);
  void norm_backward(Tensor& dheads, const LinearIndex& linear, int norm, const ConstTensorView& x);
  void attention_back(const Tensor& dattended);
  void one_position_back(const Tensor& dattended);

  const Context& context_;
  const LayerHeads heads_;
  const Saved& saved_;
  Steps steps_;
  PendingGradients pending_;
  const DType dtype_;
  InputGradients gradients_;
};

}  // namespace ladon::multi_head
