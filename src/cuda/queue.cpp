#include "cuda/queue.h"

#include "cuda/error.h"

namespace ladon::cuda {

Queue::Queue(int device_index, cudaStream_t stream, WorkspacePool& scratch)
    : device_index_(device_index), stream_(stream), scratch_(scratch), staging_(device_index) {
  check(cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device_index),
        "Context");
}

void Queue::launch_kernel(const void* kernel, const Grid& grid, void** arguments) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
  constexpr std::size_t kDefaultLimit = std::size_t{48} << 10;
  if (grid.shared_bytes > kDefaultLimit) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(grid.shared_bytes)),
          "launch");
  }
  check(cudaLaunchKernel(kernel, grid.blocks, grid.threads, arguments, grid.shared_bytes, stream_),
        "launch");
}

void Queue::upload(void* to, const void* from, std::size_t bytes) {
  staging_.copy(to, from, bytes, stream_);
}

}  // namespace ladon::cuda
