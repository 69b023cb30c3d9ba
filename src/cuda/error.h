// CUDA's status codes as Ladon's errors.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <string_view>

namespace ladon::cuda {

/// Throws Error where a CUDA call failed: kOutOfMemory or kDevice, with CUDA's own words.
void check(cudaError_t status, std::string_view operation);

/// "cudaErrorNoDevice: no CUDA-capable device is detected".
std::string describe(cudaError_t status);

/// Makes a device the calling thread's current one for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int index) noexcept;
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  cudaError_t status() const noexcept { return status_; }

 private:
  int previous_ = 0;
  bool switched_ = false;
  cudaError_t status_ = cudaSuccess;
};

}  // namespace ladon::cuda
