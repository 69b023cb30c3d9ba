// Products of 16-bit matrices by Hopper's own kernel.
#pragma once

#include <span>

#include "cuda/queue.h"

namespace ladon::cuda {

namespace projection {
struct Product;
}

namespace hopper {

/// Each enqueues the product and returns true where the kernel (product.cuh) can compute it and it
/// is large enough to be worth it; else does nothing. Several, up to kMostProducts, as one launch:
/// they have one k and dtype.
bool multiply_forward(Queue& queue, std::span<const projection::Product> products);
bool multiply_input_gradient(Queue& queue, const projection::Product& product);
bool multiply_weight_gradients(Queue& queue, std::span<const projection::Product> products);

}  // namespace hopper
}  // namespace ladon::cuda
