// Attention over latents (MLA, absorbed) by Hopper's own kernel.
#pragma once

#include <cstdint>

#include "core/attention_params.h"
#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

namespace hopper {

/// Enqueues the call and returns true where the kernel (latent.cuh) can compute it: keys of 512 to
/// 576 columns, the first 512 of which are the values too. Else does nothing. `call` is the host's,
/// `params` the same for kernels; the longest sequence has `segments`.
bool attend_latents(Queue& queue, const AttentionParams& call, ForwardParams<float> params,
                    std::int64_t segments);

}  // namespace hopper
}  // namespace ladon::cuda
