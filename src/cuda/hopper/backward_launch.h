// Launches of Hopper's backward kernels, defined in the files that instantiate them.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda::hopper {

struct HopperBackwardParams;

/// dk and dv, and the sums of dq. `is_wide`: heads above 64.
void launch_backward_bf16(Queue& queue, int blocks, bool is_wide,
                          const HopperBackwardParams& params);
/// dq from its sums.
void launch_finish_dq_bf16(Queue& queue, bool is_wide, const HopperBackwardParams& params);

}  // namespace ladon::cuda::hopper
