// Products of 16-bit matrices by Hopper's own kernel.
#pragma once

#include "cuda/queue.h"

namespace ladon::cuda {

namespace projection {
struct Product;
}

namespace hopper {

/// Each enqueues the product and returns true where the kernel (product.cuh) can compute it and it
/// is large enough to be worth it; else does nothing.
bool multiply_forward(Queue& queue, const projection::Product& product);
bool multiply_input_gradient(Queue& queue, const projection::Product& product);
bool multiply_weight_gradient(Queue& queue, const projection::Product& product);

}  // namespace hopper
}  // namespace ladon::cuda
