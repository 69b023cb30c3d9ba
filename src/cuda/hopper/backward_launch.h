// Launches of Hopper's backward kernels, defined in the files that instantiate them.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda::hopper {

struct HopperBackwardParams;

/// `is_wide`: heads above 64.
void launch_dkdv_bf16(Queue& queue, int blocks, bool is_wide, const HopperBackwardParams& params);
void launch_dq_bf16(Queue& queue, int blocks, bool is_wide, const HopperBackwardParams& params);

}  // namespace ladon::cuda::hopper
