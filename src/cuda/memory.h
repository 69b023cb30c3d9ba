// CudaMemory: the memory of one Context on a GPU.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <memory>
#include <optional>

#include "core/device_memory.h"
#include "cuda/gpu.h"

namespace ladon::cuda {

class Recording;

/// Allocates and copies in the order of the Context's stream. When the Context has gone, what
/// tensors still hold is freed all the same.
class CudaMemory final : public DeviceMemory {
 public:
  /// With the program's stream, or its own where there is none. A stream must be of this GPU.
  CudaMemory(int device_index, std::optional<cudaStream_t> borrowed);
  ~CudaMemory() override;

  DeviceId device() const noexcept override { return {Device::kCuda, gpu_->index()}; }
  cudaStream_t stream() const noexcept { return stream_; }
  Gpu& gpu() const noexcept { return *gpu_; }

  void* allocate(std::size_t bytes) noexcept override;
  void free(void* data, std::size_t bytes) noexcept override;
  std::optional<std::size_t> free_bytes() const override { return gpu_->free_bytes(); }
  void copy(void* to, const void* from, std::size_t bytes) noexcept override;
  void zero(void* data, std::size_t bytes) noexcept override;
  void upload(void* to, const void* from, std::size_t bytes) override;
  void download(void* to, const void* from, std::size_t bytes) override;

  /// What a Graph gathers the Context's work in; null where it is enqueued at once.
  Recording* recording() const noexcept { return recording_; }
  /// Throws Error where one does already.
  void begin_recording(Recording& recording);
  /// The recorded work is enqueued: what was freed meanwhile may go.
  void end_recording() noexcept;
  /// Throws Error for a call that waits while a Graph records.
  void refuse_while_recording(const char* operation) const;

  /// The Context goes. What is done with the memory afterwards waits until it is done.
  void close() noexcept;

 private:
  /// The Context's, while there is one.
  cudaStream_t work_stream() const noexcept { return open_ || owns_stream_ ? stream_ : nullptr; }
  /// After work was enqueued: waits for it where no Context would.
  void settle() const noexcept;

  std::shared_ptr<Gpu> gpu_;
  cudaStream_t stream_ = nullptr;
  bool owns_stream_ = false;
  std::atomic<bool> open_ = true;
  std::atomic<Recording*> recording_ = nullptr;
};

}  // namespace ladon::cuda
