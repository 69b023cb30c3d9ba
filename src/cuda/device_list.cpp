#include "cuda/device_list.h"

#include <cuda_runtime_api.h>

#include <string>

#include "core/fail.h"
#include "cuda/error.h"

namespace ladon::cuda {
namespace {

// The kernels are compiled for Ampere and newer.
constexpr int kOldestMajor = 8;

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

/// The number of GPUs, or why there are none.
struct Count {
  int devices = 0;
  std::string reason;
};

Count count_devices() {
  int driver = 0;
  static_cast<void>(cudaDriverGetVersion(&driver));
  if (driver == 0) return {0, "no NVIDIA driver was found"};
  Count count;
  const cudaError_t status = cudaGetDeviceCount(&count.devices);
  static_cast<void>(cudaGetLastError());
  if (status == cudaErrorInsufficientDriver) {
    return {0, "the NVIDIA driver supports CUDA " + version_text(driver) +
                   ", older than this build's " + version_text(CUDART_VERSION)};
  }
  if (status != cudaSuccess) return {0, describe(status)};
  if (count.devices == 0) count.reason = "the NVIDIA driver found no GPU";
  return count;
}

}  // namespace

DeviceList list_devices() {
  const Count count = count_devices();
  DeviceList list{{}, count.reason};
  for (int index = 0; index < count.devices; ++index) {
    const DeviceScope scope(index);
    cudaDeviceProp properties{};
    if (cudaGetDeviceProperties(&properties, index) != cudaSuccess) continue;
    DeviceInfo info;
    info.id = {Device::kCuda, index};
    info.name = properties.name;
    info.capability = std::to_string(properties.major) + "." + std::to_string(properties.minor);
    info.num_multiprocessors = properties.multiProcessorCount;
    static_cast<void>(cudaMemGetInfo(&info.free_bytes, &info.memory_bytes));
    list.devices.push_back(info);
  }
  if (list.devices.empty() && list.reason.empty()) list.reason = "no GPU could be asked";
  return list;
}

void check_device(std::string_view operation, int index) {
  const Count count = count_devices();
  if (count.devices == 0) {
    fail(ErrorCode::kUnsupported, operation, "device", "got cuda, expected cpu: " + count.reason);
  }
  if (index < 0 || index >= count.devices) {
    fail(operation, "device_index",
         "got " + std::to_string(index) + ", expected 0 to " + std::to_string(count.devices - 1));
  }
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), operation);
  if (major < kOldestMajor) {
    fail(ErrorCode::kUnsupported, operation, "device",
         "got a GPU of compute capability " + std::to_string(major) + ".x, expected " +
             std::to_string(kOldestMajor) + ".0 or newer");
  }
}

}  // namespace ladon::cuda
