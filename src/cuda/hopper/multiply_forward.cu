// y = x W^T + b of 16-bit operands. See product.cuh.

#include "cuda/hopper/multiply.cuh"
#include "cuda/hopper/multiply.h"

namespace ladon::cuda::hopper {

bool multiply_forward(Queue& queue, std::span<const Product> products) {
  return multiply<projection::AlongK<true, true>, projection::StoreSums>(queue, products);
}

}  // namespace ladon::cuda::hopper
