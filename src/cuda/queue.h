// Queue: one stream of a GPU, and what operations need to enqueue their kernels on it.
//
// A kernel takes one params struct, by value, and is launched through Queue::launch(). Work that is
// enqueued runs in order, so scratch memory may be given back as soon as its last reader is
// enqueued: whoever takes it next writes it later.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>

#include "core/workspace.h"
#include "cuda/staging.h"

namespace ladon::cuda {

/// The size of a launch. `shared_bytes` is dynamic shared memory.
struct Grid {
  dim3 blocks;
  dim3 threads;
  std::size_t shared_bytes = 0;
};

class Queue {
 public:
  Queue(int device_index, cudaStream_t stream, WorkspacePool& scratch);

  int device_index() const noexcept { return device_index_; }
  cudaStream_t stream() const noexcept { return stream_; }
  int num_multiprocessors() const noexcept { return num_multiprocessors_; }
  /// For temporaries of one call.
  WorkspacePool& scratch() noexcept { return scratch_; }

  /// Throws Error where CUDA refuses the launch. A grid without blocks launches nothing.
  template <class Params>
  void launch(void (*kernel)(Params), const Grid& grid, Params params) {
    static_assert(sizeof(Params) <= 4096, "kernel parameters are limited to 4 KiB");
    void* arguments[] = {&params};
    launch_kernel(reinterpret_cast<const void*>(kernel), grid, arguments);
  }

  /// Copies host memory to the device. The host's side may be used again when this returns.
  void upload(void* to, const void* from, std::size_t bytes);

 private:
  void launch_kernel(const void* kernel, const Grid& grid, void** arguments);

  const int device_index_;
  const cudaStream_t stream_;
  WorkspacePool& scratch_;
  Staging staging_;
  int num_multiprocessors_ = 1;
};

/// A list of the host's, as kernels of one call see it.
template <class Element>
class HostList {
 public:
  HostList(Queue& queue, std::span<const Element> list) : memory_(queue.scratch(), bytes_of(list)) {
    if (!list.empty()) queue.upload(memory_.data(), list.data(), list.size_bytes());
  }

  const Element* data() const noexcept { return reinterpret_cast<const Element*>(memory_.data()); }

 private:
  static std::size_t bytes_of(std::span<const Element> list) {
    return list.empty() ? sizeof(Element) : list.size_bytes();
  }
  Workspace memory_;
};

}  // namespace ladon::cuda
