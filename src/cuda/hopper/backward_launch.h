// Launches of Hopper's backward kernels, defined in the files that instantiate them.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda::hopper {

struct HopperBackwardParams;

/// The columns of q and k, and of v and dout, that kernels are made for (backward_tile.cuh).
enum class BackwardWidth { k64, k128, k192And128, k256 };

/// dk and dv, and the sums of dq.
void launch_backward_bf16(Queue& queue, int blocks, BackwardWidth width,
                          const HopperBackwardParams& params);
/// dq from its sums.
void launch_finish_dq_bf16(Queue& queue, BackwardWidth width, const HopperBackwardParams& params);

// Those of the largest width are two kernels, for dk and dv and for dq.
void launch_wide_keys_bf16(Queue& queue, int blocks, const HopperBackwardParams& params);
void launch_wide_rows_bf16(Queue& queue, int blocks, const HopperBackwardParams& params);

}  // namespace ladon::cuda::hopper
