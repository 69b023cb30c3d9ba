#include "cuda/memory.h"

#include "core/fail.h"
#include "cuda/error.h"
#include "cuda/recording.h"

namespace ladon::cuda {
namespace {

/// Refuses a stream of another GPU: an event of this one cannot be recorded there.
void check_stream(cudaStream_t stream, int device_index) {
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "Context");
  const cudaError_t status = cudaEventRecord(event, stream);
  static_cast<void>(cudaEventDestroy(event));
  static_cast<void>(cudaGetLastError());
  if (status == cudaSuccess) return;
  fail("Context", "stream",
       "got " + describe(status) + ", expected a stream of cuda:" + std::to_string(device_index));
}

/// The two ends of a copy must be where the caller says.
void check_ends(const char* operation, const void* host, const void* device, int device_index) {
  cudaPointerAttributes attributes{};
  check(cudaPointerGetAttributes(&attributes, host), operation);
  if (attributes.type == cudaMemoryTypeDevice) {
    fail(operation, "data",
         "got memory of cuda:" + std::to_string(attributes.device) + ", expected the host's");
  }
  check(cudaPointerGetAttributes(&attributes, device), operation);
  if (attributes.type == cudaMemoryTypeUnregistered || attributes.type == cudaMemoryTypeHost) {
    fail(operation, "data",
         "got memory of the host, expected that of cuda:" + std::to_string(device_index));
  }
}

}  // namespace

CudaMemory::CudaMemory(int device_index, std::optional<cudaStream_t> borrowed)
    : gpu_(Gpu::of(device_index)) {
  const DeviceScope scope(device_index);
  if (borrowed) {
    check_stream(*borrowed, device_index);
    stream_ = *borrowed;
  } else {
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "Context");
    owns_stream_ = true;
  }
  gpu_->add(stream_);
}

CudaMemory::~CudaMemory() {
  close();
  if (owns_stream_) static_cast<void>(cudaStreamDestroy(stream_));
}

void CudaMemory::close() noexcept {
  if (!open_.exchange(false)) return;
  const DeviceScope scope(gpu_->index());
  static_cast<void>(cudaStreamSynchronize(stream_));
  gpu_->remove(stream_);
  gpu_->trim();
}

void CudaMemory::settle() const noexcept {
  if (!open_) static_cast<void>(cudaStreamSynchronize(work_stream()));
}

void CudaMemory::begin_recording(Recording& recording) {
  Recording* none = nullptr;
  if (!recording_.compare_exchange_strong(none, &recording)) {
    fail("Graph::run", "context", "got one whose calls a Graph records already, expected another");
  }
  gpu_->hold_frees();
}

void CudaMemory::end_recording() noexcept {
  recording_ = nullptr;
  gpu_->release_frees();
}

void CudaMemory::refuse_while_recording(const char* operation) const {
  if (recording_ == nullptr) return;
  fail(operation, "context",
       "got a call that waits for the device, expected none while a Graph "
       "records");
}

void* CudaMemory::allocate(std::size_t bytes) noexcept {
  void* const data = gpu_->allocate(bytes, work_stream());
  settle();
  return data;
}

void CudaMemory::free(void* data, std::size_t) noexcept { gpu_->free(data); }

void CudaMemory::copy(void* to, const void* from, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  if (Recording* const recording = recording_) return recording->try_copy(to, from, bytes);
  const DeviceScope scope(gpu_->index());
  static_cast<void>(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, work_stream()));
  settle();
}

void CudaMemory::zero(void* data, std::size_t bytes) noexcept {
  if (bytes == 0) return;
  if (Recording* const recording = recording_) return recording->try_zero(data, bytes);
  const DeviceScope scope(gpu_->index());
  static_cast<void>(cudaMemsetAsync(data, 0, bytes, work_stream()));
  settle();
}

void CudaMemory::upload(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  refuse_while_recording("upload");
  const DeviceScope scope(gpu_->index());
  check_ends("upload", from, to, gpu_->index());
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, work_stream()), "upload");
  check(cudaStreamSynchronize(work_stream()), "upload");
}

void CudaMemory::download(void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  refuse_while_recording("download");
  const DeviceScope scope(gpu_->index());
  check_ends("download", to, from, gpu_->index());
  check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, work_stream()), "download");
  check(cudaStreamSynchronize(work_stream()), "download");
}

}  // namespace ladon::cuda
