// The size of a launch.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>

namespace ladon::cuda {

/// `shared_bytes` is dynamic shared memory. `starts_early`: the kernel waits for the one before it
/// by itself (kernels/dependent_launch.cuh).
struct Grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes = 0;
  bool starts_early = false;
};

/// Enqueues a kernel that takes one params struct.
inline cudaError_t enqueue_kernel(const void* kernel, const Grid& grid, void* params,
                                  cudaStream_t stream) {
  void* arguments[] = {params};
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid.blocks;
  config.blockDim = grid.threads;
  config.dynamicSmemBytes = grid.shared_bytes;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = grid.starts_early ? 1 : 0;
  return cudaLaunchKernelExC(&config, kernel, arguments);
}

}  // namespace ladon::cuda
