// HopperKernelsTest: a test that compares kernels for Hopper with the generic ones.
#pragma once

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

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
  explicit HopperKernelsTest(std::string kernels) : kernels_(std::move(kernels)) {}

  void SetUp() override {
    CudaTest::SetUp();
    if (IsSkipped()) return;
    const std::string capability = list_devices().devices[0].capability;
    if (capability != "9.0") {
      GTEST_SKIP() << "skipped: the GPU has compute capability " << capability << ", not 9.0";
    }
    hopper_ = context_of(kernels_);
    generic_ = context_of("generic");
  }

  std::optional<Context> hopper_;
  std::optional<Context> generic_;

 private:
  const std::string kernels_;
};

}  // namespace ladon::test
