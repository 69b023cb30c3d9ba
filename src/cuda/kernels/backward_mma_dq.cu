// dq on tensor cores: a block for each 64 rows of a head. See backward_mma.cuh.

#include "cuda/kernels/backward_mma.cuh"

namespace ladon::cuda::backward {

void mma_dq(Queue& queue, const BackwardParams& params) {
  if (params.call.q.dtype == DType::kF16) {
    launch_mma<__half, false>(queue, params);
  } else {
    launch_mma<__nv_bfloat16, false>(queue, params);
  }
}

}  // namespace ladon::cuda::backward
