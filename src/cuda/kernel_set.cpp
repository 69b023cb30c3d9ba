#include "cuda/kernel_set.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>

#include "core/fail.h"
#include "cuda/error.h"

namespace ladon::cuda {

KernelSet choose_kernels(int device_index) {
  int major = 0;
  int minor = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_index), "Context");
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device_index), "Context");
  const bool is_hopper = major == 9 && minor == 0;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): only setenv() races with it
  const char* const value = std::getenv("LADON_CUDA_KERNELS");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty()) return is_hopper ? KernelSet::kHopper : KernelSet::kGeneric;
  if (wanted == "generic") return KernelSet::kGeneric;
  if (wanted != "hopper") {
    fail("Context", "LADON_CUDA_KERNELS", "got '" + wanted + "', expected generic or hopper");
  }
  if (!is_hopper) {
    fail(ErrorCode::kUnsupported, "Context", "LADON_CUDA_KERNELS",
         "got hopper, but cuda:" + std::to_string(device_index) + " has compute capability " +
             std::to_string(major) + "." + std::to_string(minor) + ", expected 9.0");
  }
  return KernelSet::kHopper;
}

}  // namespace ladon::cuda
