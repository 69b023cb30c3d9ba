// Operands on the host and on the pretended device, for tests that calls refuse those that are
// elsewhere than their Context.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

#include "ladon/context.h"
#include "ladon/tensor.h"
#include "support/error_of.h"
#include "support/pretended_device.h"

namespace ladon::test {

class DeviceTest : public testing::Test {
 protected:
  static constexpr std::int64_t kHeads = 2;
  static constexpr std::int64_t kDim = 4;

  static Tensor host(DType dtype, const Dims& shape) { return Tensor(dtype, shape); }
  Tensor device(DType dtype, const Dims& shape) const { return Tensor(device_, dtype, shape); }

  /// The call names the argument and both devices.
  static void expect_refused(const std::string& operation, const std::string& argument,
                             const std::function<void()>& call, bool runs_on_device = false) {
    const std::string here = runs_on_device ? "cuda:77" : "cpu";
    const std::string there = runs_on_device ? "cpu" : "cuda:77";
    EXPECT_EQ(error_of(call), operation + ": " + argument + ": got memory of " + there +
                                  ", expected memory of " + here + ", where the call runs");
  }

  Context cpu_{ContextOptions{.num_threads = 2}};
  Context device_ = pretended_context({.num_threads = 2});
  Tensor q_ = host(DType::kF32, {1, 3, kHeads, kDim});
  Tensor device_q_ = device(DType::kF32, {1, 3, kHeads, kDim});
  Tensor lse_ = host(DType::kF32, {1, kHeads, 3});
  Tensor device_lse_ = device(DType::kF32, {1, kHeads, 3});
  Tensor out_ = host(DType::kF32, {1, 3, kHeads, kDim});
  Tensor x_ = host(DType::kF32, {1, 3, 8});
  Tensor device_x_ = device(DType::kF32, {1, 3, 8});
};

}  // namespace ladon::test
