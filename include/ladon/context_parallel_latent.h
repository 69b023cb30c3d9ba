// LatentAttention (MLA) over the ranks of a communicator, each of which holds some of the tokens.
//
// Ranks gather latents and rope keys, kv_rank + rope_dim elements a token, and expand them where
// they are needed: of DeepSeek-V3 that is a 71st of the keys and values. Every rank has the whole
// layer.
//
// Outputs have the bits of the layer in one process with the same instruction set, for any number
// of ranks and any plan. Gradients of inputs and parameters are sums over ranks: the same bits in
// every run for the same ranks, and those of parameters the same on all ranks, so that layers that
// were the same stay so in training.
#pragma once

#include "ladon/attention_layer.h"
#include "ladon/communicator.h"
#include "ladon/context_parallel.h"
#include "ladon/export.h"
#include "ladon/latent_attention.h"

namespace ladon {

/// Inputs and the output are this rank's tokens, in the order of its ranges in the plan; without a
/// key input, plan.keys must be plan.queries. LayerCall is the whole's: masks, lengths and explicit
/// positions are those of all tokens. The plan's scheme must be kAllGather or kAuto, which both
/// gather; kv_heads_at_once are the heads whose keys and values exist at the same time.
/// LayerCall::weights is not supported.
LADON_API Tensor context_parallel_forward(const Context& context, Communicator& communicator,
                                          const LatentAttention& layer, const LayerInputs& inputs,
                                          const ContextPlan& plan, const LayerCall& call = {});
/// Writes `out`, as AttentionLayer::forward() does.
LADON_API void context_parallel_forward(const Context& context, Communicator& communicator,
                                        const LatentAttention& layer, const LayerInputs& inputs,
                                        const ContextPlan& plan, const LayerCall& call,
                                        const TensorView& out);

/// The same, and what context_parallel_backward() needs.
LADON_API TrainingForward context_parallel_forward_training(
    const Context& context, Communicator& communicator, const LatentAttention& layer,
    const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call = {});
LADON_API SavedForward context_parallel_forward_training(
    const Context& context, Communicator& communicator, const LatentAttention& layer,
    const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call,
    const TensorView& out);

/// Gradients of this rank's inputs. Adds to the layer's gradients those of all tokens.
LADON_API InputGradients context_parallel_backward(const Context& context,
                                                   Communicator& communicator,
                                                   LatentAttention& layer,
                                                   const ConstTensorView& grad_out,
                                                   const SavedForward& saved);
/// Writes them to the caller's memory, as AttentionLayer::backward() does.
LADON_API void context_parallel_backward(const Context& context, Communicator& communicator,
                                         LatentAttention& layer, const ConstTensorView& grad_out,
                                         const SavedForward& saved,
                                         const InputGradientViews& gradients);

}  // namespace ladon
