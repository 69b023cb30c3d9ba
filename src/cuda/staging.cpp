#include "cuda/staging.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda/error.h"

namespace ladon::cuda {
namespace {

constexpr std::size_t kSmallestBuffer = std::size_t{64} << 10;

}  // namespace

Staging::~Staging() {
  const DeviceScope scope(device_index_);
  for (const Buffer& buffer : buffers_) {
    static_cast<void>(cudaEventSynchronize(buffer.copied));
    static_cast<void>(cudaEventDestroy(buffer.copied));
    static_cast<void>(cudaFreeHost(buffer.data));
  }
}

Staging::Buffer& Staging::unused(std::size_t bytes) {
  for (Buffer& buffer : buffers_) {
    if (buffer.size < bytes) continue;
    const cudaError_t status = cudaEventQuery(buffer.copied);
    if (status == cudaErrorNotReady) continue;
    check(status, "upload");
    return buffer;
  }
  buffers_.reserve(buffers_.size() + 1);
  Buffer buffer;
  buffer.size = std::max(kSmallestBuffer, std::bit_ceil(bytes));
  check(cudaHostAlloc(&buffer.data, buffer.size, cudaHostAllocDefault), "upload");
  const cudaError_t status = cudaEventCreateWithFlags(&buffer.copied, cudaEventDisableTiming);
  if (status != cudaSuccess) static_cast<void>(cudaFreeHost(buffer.data));
  check(status, "upload");
  return buffers_.emplace_back(buffer);
}

void Staging::copy(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  if (bytes == 0) return;
  const std::lock_guard lock(mutex_);
  Buffer& buffer = unused(bytes);
  std::memcpy(buffer.data, from, bytes);
  check(cudaMemcpyAsync(to, buffer.data, bytes, cudaMemcpyHostToDevice, stream), "upload");
  check(cudaEventRecord(buffer.copied, stream), "upload");
}

}  // namespace ladon::cuda
