// Attention over latents (MLA, absorbed) by Hopper's own kernel.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

namespace hopper {

/// Whether the kernel (latent.cuh) can compute the call but for its alignment: keys of 512 to 576
/// columns, the first 512 of which are the values too.
bool takes_latents(const AttentionParams& call);

/// Enqueues a call that takes_latents() and returns true where memory is aligned as copies want it.
/// Else does nothing. `call` is the host's, `params` the same for kernels; the longest sequence has
/// `segments`.
bool attend_latents(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
                    std::int64_t segments);

}  // namespace hopper
}  // namespace ladon::cuda
