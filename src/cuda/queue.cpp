#include "cuda/queue.h"

#include "core/fail.h"
#include "cuda/error.h"
#include "cuda/queue_resources.h"
#include "cuda/recording.h"

namespace ladon::cuda {

Queue::Queue(QueueResources& resources)
    : resources_(resources),
      device_index_(resources.memory->device().index),
      kernels_(choose_kernels(device_index_)) {
  check(
      cudaDeviceGetAttribute(&num_multiprocessors_, cudaDevAttrMultiProcessorCount, device_index_),
      "Context");
  check(cudaDeviceGetAttribute(&shared_memory_, cudaDevAttrMaxSharedMemoryPerBlockOptin,
                               device_index()),
        "Context");
  check(cudaDeviceGetAttribute(&l2_cache_, cudaDevAttrL2CacheSize, device_index_), "Context");
}

WorkspacePool& Queue::scratch() noexcept { return resources_.scratch; }

void Queue::refuse_capture() const {
  if (resources_.memory->recording() != nullptr) return;
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(resources_.memory->stream(), &capture), "Context");
  if (capture == cudaStreamCaptureStatusNone) return;
  fail("Context", "stream",
       "got a stream that is being captured, expected none: ladon::Graph records such calls");
}

Metadata& Queue::metadata() noexcept {
  Recording* const recording = resources_.memory->recording();
  return recording == nullptr ? resources_.metadata : recording->metadata();
}

HeldList Queue::hold(std::span<const std::byte> list) { return metadata().hold(*this, list); }

void Queue::launch_kernel(const void* kernel, Grid grid, void* params, std::size_t bytes) {
  if (grid.blocks.x == 0 || grid.blocks.y == 0 || grid.blocks.z == 0) return;
  grid.starts_early = grid.starts_early && resources_.memory->gpu().waits_by_itself(kernel);
  resources_.memory->gpu().allow_shared_memory(kernel, grid.shared_bytes);
  if (Recording* const recording = resources_.memory->recording()) {
    return recording->add_kernel(kernel, grid, params, bytes);
  }
  check(enqueue_kernel(kernel, grid, params, resources_.memory->stream()), "launch");
}

void Queue::upload(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = resources_.memory->recording()) {
    return recording->add_upload(to, from, bytes);
  }
  resources_.staging.copy(to, from, bytes, resources_.memory->stream());
}

void Queue::copy(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = resources_.memory->recording()) {
    return recording->add_copy(to, from, bytes);
  }
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, resources_.memory->stream()),
        "copy");
}

void Queue::zero(void* to, std::size_t bytes) {
  if (bytes == 0) return;
  if (Recording* const recording = resources_.memory->recording())
    return recording->add_zero(to, bytes);
  check(cudaMemsetAsync(to, 0, bytes, resources_.memory->stream()), "zero");
}

void Queue::download(void* to, const void* from, std::size_t bytes) {
  resources_.memory->download(to, from, bytes);
}

void Queue::synchronize() {
  resources_.memory->refuse_while_recording("synchronize");
  check(cudaStreamSynchronize(resources_.memory->stream()), "synchronize");
}

}  // namespace ladon::cuda
