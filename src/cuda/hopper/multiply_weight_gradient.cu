// dw += dy^T x of 16-bit operands. See product.cuh.

#include "cuda/hopper/multiply.cuh"
#include "cuda/hopper/multiply.h"

namespace ladon::cuda::hopper {

bool multiply_weight_gradients(Queue& queue, std::span<const Product> products) {
  return multiply<projection::AlongK<false, false>, projection::AddSums>(queue, products);
}

}  // namespace ladon::cuda::hopper
