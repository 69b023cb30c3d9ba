// y = x W^T + b of 16-bit x and W for many rows, by tensor cores. Both are contiguous along k.
#include "cuda/hopper/multiply.h"
#include "cuda/kernels/projection_mma.cuh"

namespace ladon::cuda::projection {

void launch_tensor_core_forward(Queue& queue, std::span<const Product> products) {
  if (hopper::multiply_forward(queue, products)) return;
  for (const Product& product : products) {
    launch_tensor_core<AlongK<true, true>, StoreSums>(queue, product,
                                                      fills_gpu(queue, product, LargeTile::kM));
  }
}

}  // namespace ladon::cuda::projection
