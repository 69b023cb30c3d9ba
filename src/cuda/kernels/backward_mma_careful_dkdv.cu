// dk and dv on tensor cores, of the tiles that meet NaN or infinity. See backward_careful.cuh.

#include "cuda/kernels/backward_mma.cuh"

namespace ladon::cuda::backward {

void careful_mma_dkdv(Queue& queue, const BackwardParams& params) {
  if (params.call.q.dtype == DType::kF16) {
    launch_careful_mma<__half, true>(queue, params);
  } else {
    launch_careful_mma<__nv_bfloat16, true>(queue, params);
  }
}

}  // namespace ladon::cuda::backward
