// y = x W^T + b of 16-bit operands. See product.cuh.

#include "cuda/hopper/multiply.cuh"
#include "cuda/hopper/multiply.h"

namespace ladon::cuda::hopper {

bool multiply_forward(Queue& queue, const Product& product) {
  return multiply<projection::AlongK<true, true>, projection::StoreSums>(queue, product);
}

}  // namespace ladon::cuda::hopper
