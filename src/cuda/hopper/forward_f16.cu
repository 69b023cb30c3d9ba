#include "cuda/hopper/forward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_forward_f16(Queue& queue, int blocks, bool is_wide, const HopperForwardParams& params) {
  launch_forward<__half>(queue, blocks, is_wide, params);
}

}  // namespace ladon::cuda::hopper
