// Attention forward by Hopper's own kernel.
#pragma once

#include "core/attention_params.h"
#include "cuda/queue.h"

namespace ladon::cuda {

template <class Compute>
struct ForwardParams;

namespace hopper {

/// Enqueues the call and returns true where the kernel (forward.cuh) can compute it and it has
/// enough rows to be worth it; else does nothing. `call` is the host's, `params` the same for
/// kernels.
bool attend(Queue& queue, const AttentionParams& call, ForwardParams<float> params);

}  // namespace hopper
}  // namespace ladon::cuda
