// Backward of the heads of MultiHeadAttention: from the attended values to the inputs.
#pragma once

#include "layers/multi_head.h"
#include "layers/pending_gradients.h"

namespace ladon::multi_head {

/// Sums the gradients of inputs and parameters, all but those of the output projection.
class HeadsBackward {
 public:
  /// `layer` is that of `heads`.
  HeadsBackward(const Context& context, AttentionLayer& layer, const LayerHeads& heads,
                const Saved& saved);

  void run(const Tensor& dattended);

  /// The gradients of inputs so far, in the dtype of sums; key and value are empty where the call
  /// did not give them.
  InputGradients& sums() { return sums_; }
  PendingGradients& pending() { return pending_; }
  /// The sums in the layer's dtype, without a batch where the inputs had none.
  InputGradients finished() const;

 private:
  Tensor sum_for(const Tensor& input) const;
  Tensor& key_sum() { return saved_.self ? sums_.query : sums_.key; }
  Tensor& value_sum() { return saved_.own_value ? sums_.value : key_sum(); }
  void project_back(const Tensor& dy, const LinearIndex& linear, const ConstTensorView& x,
                    Tensor& dx);
  void norm_and_rope_backward(Tensor& dheads, const LinearIndex& linear, int norm,
                              const ConstTensorView& x, const RopePositions& positions);
  void attention_back(const Tensor& dattended);

  const Context& context_;
  const LayerHeads heads_;
  const Saved& saved_;
  Steps steps_;
  PendingGradients pending_;
  InputGradients sums_;
};

}  // namespace ladon::multi_head
