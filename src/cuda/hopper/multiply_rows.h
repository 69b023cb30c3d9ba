// y = x W^T + b of few rows by Hopper's own kernel.
#pragma once

#include <span>

#include "cuda/queue.h"

namespace ladon::cuda {

namespace projection {
struct Product;
}

namespace hopper {

/// Enqueues the products as one launch and returns true where the kernel (product_rows.cuh) can
/// compute them and it is the fastest for so many rows; else does nothing.
bool multiply_rows(Queue& queue, std::span<const projection::Product> products);

}  // namespace hopper
}  // namespace ladon::cuda
