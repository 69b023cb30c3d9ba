// Staging: pinned host memory through which small lists travel to the device without a wait.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <mutex>
#include <vector>

namespace ladon::cuda {

/// Keeps its buffers, so that a steady state allocates nothing. Thread-safe.
class Staging {
 public:
  explicit Staging(int device_index) noexcept : device_index_(device_index) {}
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Enqueues a copy; `from` may be used again when this returns.
  void copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream);

 private:
  struct Buffer {
    void* data = nullptr;
    std::size_t size = 0;
    cudaEvent_t copied = nullptr;  // recorded after the last copy out of it
  };

  /// One whose last copy has ended, and that is large enough.
  Buffer& unused(std::size_t bytes);

  const int device_index_;
  std::mutex mutex_;
  std::vector<Buffer> buffers_;
};

}  // namespace ladon::cuda
