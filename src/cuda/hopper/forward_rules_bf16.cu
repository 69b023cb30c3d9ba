#include "cuda/hopper/forward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_forward_rules_bf16(Queue& queue, int blocks, ForwardColumns columns,
                               const HopperForwardParams& params) {
  launch_forward<__nv_bfloat16, ForwardRules::kAll>(queue, blocks, columns, params);
}

}  // namespace ladon::cuda::hopper
