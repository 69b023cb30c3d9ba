#include "cuda/queue.h"

#include "core/fail.h"
#include "cuda/error.h"
#include "cuda/recording.h"

namespace ladon::cuda {

Queue::Queue(std::shared_ptr<CudaMemory> memory, WorkspacePool& scratch)
    : memory_(std::move(memory)),
      stream_(memory_->stream()),
      scratch_(scratch),
      staging_(device_index()),
      metadata_(memory_),
      kernels_(choose_kernels(device_index())) {
  check(
      cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device_index()),
      "Context");
}

void Queue::refuse_capture() const {
  if (memory_->recording() != nullptr) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream_, &capture), "Context");
  if (capture == cudaStreamCaptureStatusNone) return;
  fail("Context", "stream",
       "got a stream that is being captured, expected none: ladon::Graph records such calls");
}

Metadata& Queue::metadata() noexcept {
  Recording* const recording = memory_->recording();
  return recording == nullptr ? metadata_ : recording->metadata();
}

void Queue::launch_kernel(const void* kernel, Grid grid, void* params, std::size_t bytes) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
  grid.starts_early = grid.starts_early && memory_->gpu().waits_by_itself(kernel);
  memory_->gpu().allow_shared_memory(kernel, grid.shared_bytes);
  if (Recording* const recording = memory_->recording()) {
    return recording->add_kernel(kernel, grid, params, bytes);
  }
  check(enqueue_kernel(kernel, grid, params, stream_), "launch");
}

void Queue::upload(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = memory_->recording()) {
    return recording->add_upload(to, from, bytes);
  }
  staging_.copy(to, from, bytes, stream_);
}

void Queue::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = memory_->recording()) {
    return recording->add_copy(to, from, bytes);
  }
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_), "copy");
}

void Queue::zero(void* to, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = memory_->recording()) return recording->add_zero(to, bytes);
  check(cudaMemsetAsync(to, 0, bytes, stream_), "zero");
}

void Queue::download(void* to, const void* from, std::size_t bytes) {
  memory_->download(to, from, bytes);
}

void Queue::synchronize() {
  memory_->refuse_while_recording("synchronize");
  check(cudaStreamSynchronize(stream_), "synchronize");
}

}  // namespace ladon::cuda
