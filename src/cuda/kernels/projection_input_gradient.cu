// dx += dy W of 16-bit dy and W, by tensor cores. The sum runs over W's rows: its tiles are
// transposed on their way from shared memory to registers.
#include "cuda/hopper/multiply.h"
#include "cuda/kernels/projection_mma.cuh"

namespace ladon::cuda::projection {

void launch_tensor_core_input_gradient(Queue& queue, const Product& product) {
  if (hopper::multiply_input_gradient(queue, product)) return;
  launch_tensor_core<AlongK<true, false>, AddSums>(queue, product,
                                                   fills_gpu(queue, product, LargeTile::kM));
}

}  // namespace ladon::cuda::projection
