// dq on tensor cores, of the tiles that meet NaN or infinity. See backward_careful.cuh.

#include "cuda/kernels/backward_mma.cuh"

namespace ladon::cuda::backward {

void careful_mma_dq(Queue& queue, const BackwardParams& params) {
  if (params.call.q.dtype == DType::kF16) {
    launch_careful_mma<__half, false>(queue, params);
  } else {
    launch_careful_mma<__nv_bfloat16, false>(queue, params);
  }
}

}  // namespace ladon::cuda::backward
