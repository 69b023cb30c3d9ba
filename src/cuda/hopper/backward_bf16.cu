#include "cuda/hopper/backward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_backward_bf16(Queue& queue, int blocks, BackwardWidth width,
                          const HopperBackwardParams& params) {
  launch_backward<__nv_bfloat16>(queue, blocks, width, params);
}

void launch_finish_dq_bf16(Queue& queue, BackwardWidth width, const HopperBackwardParams& params) {
  launch_finish_dq<__nv_bfloat16>(queue, width, params);
}

}  // namespace ladon::cuda::hopper
