#include "cuda/hopper/forward_kernels.cuh"

namespace ladon::cuda::hopper {

void launch_forward_rules_f16(Queue& queue, int blocks, ForwardColumns columns,
                              const HopperForwardParams& params) {
  launch_forward<__half, ForwardRules::kAll>(queue, blocks, columns, params);
}

}  // namespace ladon::cuda::hopper
