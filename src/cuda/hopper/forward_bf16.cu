#include "cuda/hopper/forward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_forward_bf16(Queue& queue, int blocks, bool is_wide,
                         const HopperForwardParams& params) {
  launch_forward<__nv_bfloat16>(queue, blocks, is_wide, params);
}

}  // namespace ladon::cuda::hopper
