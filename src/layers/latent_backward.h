// Backward of the heads of LatentAttention: from the attended values to the inputs.
#pragma once

#include <functional>

#include "layers/latent_steps.h"
#include "layers/layer_output.h"
#include "layers/pending_gradients.h"

namespace ladon::latent {

/// Sums the gradients of inputs and parameters. Those of the output projection only by out_back(),
/// where the whole of it is here.
class HeadsBackward {
 public:
  /// Adds to a sum over the heads that are here the sums over those that are elsewhere. What comes
  /// after it, all who have heads of the layer compute alike.
  using AddOtherHeads = std::function<void(const TensorView& sum)>;

  /// `layer` is that of `heads`.
  HeadsBackward(const Context& context, AttentionLayer& layer, const LatentHeads& heads,
                const Saved& saved, AddOtherHeads add_other_heads);

  /// The gradients of attended values.
  Tensor out_back(const ConstTensorView& grad_out);
  void run(const Tensor& dattended);

  // Its parts.
  /// From the gradients of queries, which are overwritten.
  void queries_back(Tensor& dqueries);
  /// Adds what the keys and values of some heads, [.., heads, dim], give to the gradients of their
  /// latents, [tokens, latent_dim] each, the rope key's excepted, and to kv_b_proj's.
  void expansion_back(const ConstTensorView& latents, std::int64_t first_head, const Tensor& dkeys,
                      const Tensor& dvalues, const TensorView& dlatents);
  /// The rope key's gradient is the sum over the heads that share it.
  void sum_rope_keys(const Tensor& dkeys, const TensorView& drope_key) const;
  /// From the gradients of latents, which are overwritten.
  void latents_back(Tensor& dlatents);

  PendingGradients& pending() { return pending_; }
  /// Writes the gradients of inputs, in the layer's dtype.
  void finish(InputGradientOutputs& gradients) const;

 private:
  Tensor sums(const Dims& shape) const { return {context_, steps_.compute_dtype(), shape}; }
  void project_back(const ConstTensorView& dy, const LinearIndex& linear, const ConstTensorView& x,
                    const TensorView& dx);

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
