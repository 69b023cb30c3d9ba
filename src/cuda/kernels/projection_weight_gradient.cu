// dw += dy^T x of 16-bit dy and x, by tensor cores. The sum runs over the rows of both: tiles of
// both are transposed on their way from shared memory to registers.
#include "cuda/hopper/multiply.h"
#include "cuda/kernels/projection_mma.cuh"

namespace ladon::cuda::projection {

void launch_tensor_core_weight_gradients(Queue& queue, std::span<const Product> products) {
  if (hopper::multiply_weight_gradients(queue, products)) return;
  for (const Product& product : products) {
    if (products.size() > 1 && hopper::multiply_weight_gradients(queue, {&product, 1})) continue;
    const bool large = product.splits == 1 && fills_gpu(queue, product, LargeTile::kM);
    launch_tensor_core<AlongK<false, false>, AddSums>(queue, product, large);
  }
}

}  // namespace ladon::cuda::projection
