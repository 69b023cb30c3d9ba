// The size of a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ladon::cuda {

/// `shared_bytes` is dynamic shared memory.
struct Grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes = 0;
};

}  // namespace ladon::cuda
