// dw += dy^T x of 16-bit operands. See product.cuh.

#include "cuda/hopper/multiply.cuh"
#include "cuda/hopper/multiply.h"

namespace ladon::cuda::hopper {

bool multiply_weight_gradient(Queue& queue, const Product& product) {
  return multiply<projection::AlongK<false, false>, projection::AddSums>(queue, {&product, 1});
}

}  // namespace ladon::cuda::hopper
