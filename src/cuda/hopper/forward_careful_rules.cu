// Tiles that Hopper's forward kernel with all rules has left, because they have infinities or NaN:
// by the generic kernel, compiled for Hopper alone.

#include "cuda/hopper/forward_launch.h"
#include "cuda/kernels/forward_mma_finish.cuh"

namespace ladon::cuda::hopper {

void finish_forward_rules_bf16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__nv_bfloat16, true, ForwardRules::kAll>(queue, params);
}
void finish_forward_rules_f16(Queue& queue, const ForwardParams<float>& params) {
  finish_tiles<__half, true, ForwardRules::kAll>(queue, params);
}

}  // namespace ladon::cuda::hopper
