// dk and dv on tensor cores: a block for each 64 keys of a KV head. See backward_mma.cuh.

#include "cuda/kernels/backward_mma.cuh"

namespace ladon::cuda::backward {

void mma_dkdv(Queue& queue, const BackwardParams& params) {
  if (params.call.q.dtype == DType::kF16) {
    launch_mma<__half, true>(queue, params);
  } else {
    launch_mma<__nv_bfloat16, true>(queue, params);
  }
}

}  // namespace ladon::cuda::backward
