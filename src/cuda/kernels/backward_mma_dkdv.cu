// dk and dv on tensor cores: a block for each 64 keys of a KV head. See backward_mma.cuh.

#include "cuda/kernels/backward_mma.cuh"

namespace ladon::cuda::backward {

std::size_t mma_shared_bytes(const AttentionParams& call) {
  std::size_t bytes = 0;
  with_mma_shape(call, [&](auto dims, auto full) {
    bytes = MmaShared<decltype(dims), decltype(full)::value>::kBytes;
  });
  return bytes;
}

void mma_dkdv(Queue& queue, const BackwardParams& params) {
  if (params.call.q.dtype == DType::kF16) {
    launch_mma<__half, true>(queue, params);
  } else {
    launch_mma<__nv_bfloat16, true>(queue, params);
  }
}

}  // namespace ladon::cuda::backward
