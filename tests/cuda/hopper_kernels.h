// HopperKernelsTest: a test that compares kernels for Hopper with the generic ones.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
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

/// `tensor` with one token's elements replaced.
inline Tensor with_token(const Context& context, const Tensor& tensor, std::int64_t token,
                         float value) {
  const Context host;
  Tensor changed = tensor.to_host();
  Tensor spot(DType::kF32, {tensor.size(0), 1, tensor.size(2), tensor.size(3)});
  std::fill_n(spot.data_as<float>(), spot.num_elements(), value);
  copy(host, spot, changed.view().slice(1, token, token + 1));
  Tensor there = changed.to(context);
  context.synchronize();
  return there;
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
