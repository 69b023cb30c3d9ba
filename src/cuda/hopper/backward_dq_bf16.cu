#include "cuda/hopper/backward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_dq_bf16(Queue& queue, int blocks, bool is_wide, const HopperBackwardParams& params) {
  launch_backward<__nv_bfloat16, false>(queue, blocks, is_wide, params);
}

}  // namespace ladon::cuda::hopper
