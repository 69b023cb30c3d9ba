// Launches of Hopper's forward kernels; each is defined in the file that instantiates it.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda::hopper {

struct HopperForwardParams;

/// `is_wide`: heads above 64.
void launch_forward_bf16(Queue& queue, int blocks, bool is_wide, const HopperForwardParams& params);
void launch_forward_f16(Queue& queue, int blocks, bool is_wide, const HopperForwardParams& params);

}  // namespace ladon::cuda::hopper
