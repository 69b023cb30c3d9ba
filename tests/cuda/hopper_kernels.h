// HopperKernelsTest: a test that compares kernels for Hopper with the generic ones.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

#include "cuda/cuda_test.h"

namespace ladon::test {

inline constexpr const char* kKernelsVariable = "LADON_CUDA_KERNELS";

/// A Context that runs the kernels of that name.
inline Context context_of(const std::string& kernels) {
  setenv(kKernelsVariable, kernels.c_str(), 1);
  Context context = cuda_context();
  unsetenv(kKernelsVariable);
  return context;
}

class HopperKernelsTest : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const std::string capability = list_devices().devices[0].capability;
    if (capability != "9.0") {
      GTEST_SKIP() << "skipped: the GPU has compute capability " << capability << ", not 9.0";
    }
    hopper_ = context_of("hopper");
    generic_ = context_of("generic");
  }

  std::optional<Context> hopper_;
  std::optional<Context> generic_;
};

}  // namespace ladon::test
