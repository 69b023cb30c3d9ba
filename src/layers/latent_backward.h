// Backward of the heads of LatentAttention: from the attended values to the inputs.
#pragma once

#include <functional>

#include "layers/latent_steps.h"
#include "layers/pending_gradients.h"

namespace ladon::latent {

/// Sums the gradients of inputs and parameters, all but those of the output projection.
class HeadsBackward {
 public:
  /// Adds to a sum over the heads that are here the sums over those that are elsewhere. What comes
  /// after it, all who have heads of the layer compute alike.
  using AddOtherHeads = std::function<void(const TensorView& sum)>;

  /// `layer` is that of `heads`.
  HeadsBackward(const Context& context, AttentionLayer& layer, const LatentHeads& heads,
                const Saved& saved, AddOtherHeads add_other_heads);

  void run(const Tensor& dattended);

  PendingGradients& pending() { return pending_; }
  /// The gradients of inputs in the layer's dtype, without a batch where the inputs had none.
  InputGradients finished() const;

 private:
  Tensor sums(const Dims& shape) const { return {context_, steps_.compute_dtype(), shape}; }
  Tensor finished(const Tensor& sum) const;
  void project_back(const ConstTensorView& dy, const LinearIndex& linear, const ConstTensorView& x,
                    const TensorView& dx);
  void queries_back(Tensor& dqueries);
  void sum_rope_keys(const Tensor& dkeys, const TensorView& dlatents) const;
  void latents_back(const Tensor& dkeys, const Tensor& dvalues);

  const Context& context_;
  const LatentHeads heads_;
  const LatentAttentionOptions& options_;
  const LatentAttention::Plan& plan_;
  const Saved& saved_;
  const Steps steps_;
  const AddOtherHeads add_other_heads_;
  PendingGradients pending_;
  Tensor dx_, dkey_;
};

}  // namespace ladon::latent
