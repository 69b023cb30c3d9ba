// CudaTest: a test that needs a GPU, and says why it is skipped where there is none.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "ladon/context.h"
#include "ladon/device.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "support/contexts.h"

namespace ladon::test {

/// How often a test of random cases or of repetitions does so: `whole`, or at least 2 of them where
/// the variable LADON_TEST_SHARE is below 1, as under tools that slow kernels down a hundred times.
inline int repetitions(int whole) {
  const char* const share = std::getenv("LADON_TEST_SHARE");
  if (share == nullptr) return whole;
  return std::min(whole, std::max(2, static_cast<int>(std::lround(whole * std::atof(share)))));
}

inline Context cuda_context() { return Context(ContextOptions{.device = Device::kCuda}); }

class CudaTest : public testing::Test {
 protected:
  void SetUp() override {
    const DeviceList list = list_devices();
    if (list.devices.empty()) GTEST_SKIP() << "skipped: no CUDA device: " << list.reason;
    context_ = cuda_context();
  }

  const Context& context() const { return *context_; }
  Tensor normal(DType dtype, const Dims& shape, std::uint64_t seed, double deviation = 1) const {
    Tensor tensor(context(), dtype, shape);
    fill_normal(context(), tensor, 0, deviation, seed);
    return tensor;
  }

  std::optional<Context> context_;
};

/// Of two tensors, wherever they are.
inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (a.dtype() != b.dtype() || !(a.shape() == b.shape())) return false;
  const Tensor host_a = a.to_host();
  const Tensor host_b = b.to_host();
  const auto bytes = static_cast<std::size_t>(host_a.num_elements()) * size_of(a.dtype());
  return bytes == 0 || std::memcmp(host_a.data(), host_b.data(), bytes) == 0;
}

}  // namespace ladon::test
