#include "cuda/error.h"

#include "core/fail.h"

namespace ladon::cuda {

std::string describe(cudaError_t status) {
  return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
}

void check(cudaError_t status, std::string_view operation) {
  if (status == cudaSuccess) return;
  // Errors that do not end the device's context are reported once more by the next call otherwise.
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorMemoryAllocation) {
    fail(ErrorCode::kOutOfMemory, operation, "device", "got " + describe(status));
  }
  fail(ErrorCode::kDevice, operation, "device", "got " + describe(status) + ", expected success");
}

DeviceScope::DeviceScope(int index) noexcept {
  status_ = cudaGetDevice(&previous_);
  if (status_ != cudaSuccess || previous_ == index) return;
  status_ = cudaSetDevice(index);
  switched_ = status_ == cudaSuccess;
}

DeviceScope::~DeviceScope() {
  if (switched_) static_cast<void>(cudaSetDevice(previous_));
}

}  // namespace ladon::cuda
