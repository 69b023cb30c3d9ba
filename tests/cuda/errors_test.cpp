// What goes wrong with a GPU is an Error that says what, and leaves everything else whole.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "ladon/kv_cache.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

class CudaErrors : public CudaTest {
 protected:
  /// The device still computes.
  void expect_whole() const {
    const Tensor two = Tensor::from_values(DType::kF32, {1, 1, 1, 1}, {2}).to(context());
    EXPECT_EQ(elements_of(attention(context(), two, two, two)), std::vector<double>{2});
  }
};

TEST_F(CudaErrors, OutOfMemoryTellsTheSizeAndWhatIsFree) {
  const Tensor before = normal(DType::kF32, {1000}, 1);
  const std::vector<double> elements = elements_of(before);
  const std::string message = error_of(
      [&] { Tensor(context(), DType::kF32, {std::int64_t{1} << 40}); }, ErrorCode::kOutOfMemory);
  const std::string start =
      "Tensor: shape: got [1099511627776] of f32, which takes 4398046511104 bytes, expected a "
      "size that fits the memory of cuda:0, of which ";
  EXPECT_TRUE(message.starts_with(start)) << message;
  EXPECT_TRUE(message.ends_with(" bytes are free")) << message;
  EXPECT_EQ(elements_of(before), elements);
  expect_whole();
}

TEST_F(CudaErrors, ACacheThatDoesNotFit) {
  const KvCacheOptions options{.num_kv_heads = 1 << 10, .head_dim = 1 << 10};
  error_of([&] { KvCache::contiguous(context(), options, std::int64_t{1} << 22); },
           ErrorCode::kOutOfMemory);
  expect_whole();
}

TEST_F(CudaErrors, DeviceMemoryGivenAsTheHosts) {
  Tensor there(context(), DType::kF32, {8});
  Tensor other(context(), DType::kF32, {8});
  const TensorView mislabelled(there.data(), DType::kF32, {8});
  const std::string expected = ": data: got memory of cuda:0, expected the host's";
  EXPECT_EQ(error_of([&] { copy(context(), mislabelled, other); }), "upload" + expected);
  EXPECT_EQ(error_of([&] { copy(context(), other, mislabelled); }), "download" + expected);
  expect_whole();
}

TEST_F(CudaErrors, HostMemoryGivenAsTheDevices) {
  Tensor host(DType::kF32, {8});
  const Tensor source(DType::kF32, {8});
  const TensorView mislabelled(host.data(), DType::kF32, {8}, context().device());
  const std::string expected =
      ": got a view of cuda:0 with a pointer to memory of cpu, expected one to its own";
  EXPECT_EQ(error_of([&] { copy(context(), source, mislabelled); }), "copy: to" + expected);
  Tensor target(DType::kF32, {8});
  EXPECT_EQ(error_of([&] { copy(context(), mislabelled, target); }), "copy: from" + expected);
  expect_whole();
}

TEST_F(CudaErrors, MislabelledOperands) {
  const Tensor host(DType::kF32, {1, 3, 2, 4});
  const Tensor there = host.to(context());
  const ConstTensorView host_as_device(host.data(), DType::kF32, host.shape(), context().device());
  const ConstTensorView device_as_host(there.data(), DType::kF32, host.shape());
  EXPECT_EQ(
      error_of([&] { attention(context(), there, host_as_device, there); }),
      "attention: k: got a view of cuda:0 with a pointer to memory of cpu, expected one to its "
      "own");
  EXPECT_EQ(
      error_of([&] { attention(host_context(), host, host, device_as_host); }),
      "attention: v: got a view of cpu with a pointer to memory of cuda:0, expected one to its "
      "own");
  expect_whole();
}

TEST_F(CudaErrors, OperandsOfTheHostAreRefused) {
  const Tensor host(DType::kF32, {1, 3, 2, 4});
  const Tensor there = host.to(context());
  const std::string expected =
      "attention: k: got memory of cpu, expected memory of cuda:0, where the call runs";
  EXPECT_EQ(error_of([&] { attention(context(), there, host, there); }), expected);
  EXPECT_EQ(error_of([&] { attention(host_context(), host, there, host); }),
            "attention: k: got memory of cuda:0, expected memory of cpu, where the call runs");
  EXPECT_EQ(error_of([&] { there.data_as<float>(); }),
            "data_as: view: got memory of cuda:0, which the host cannot read, expected a copy of "
            "it: Tensor::to() makes one");
}

/// Whether `call` throws an Error of the device's.
template <class Call>
bool tells_of_the_device(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.code() == ErrorCode::kDevice;
  }
  return false;
}

// In a process of its own: after a fault nothing can be computed on the device by that process.
TEST_F(CudaErrors, AFaultOfAKernelIsToldByEveryLaterCall) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto fault = [this] {
    const Tensor small = normal(DType::kF32, {1, 8, 2, 16}, 1);
    context().synchronize();
    // A view of far more memory than there is behind its pointer, which nobody can see.
    const TensorView too_long(normal(DType::kF32, {8}, 2).data(), DType::kF32,
                              {std::int64_t{1} << 42}, context().device());
    const bool first = tells_of_the_device([&] {
      fill_normal(context(), too_long, 0, 1, 3);
      context().synchronize();
    });
    const bool later =
        tells_of_the_device([&] { attention(context(), small, small, small).to_host(); });
    const bool others = tells_of_the_device([&] { cuda_context().synchronize(); });
    // Tensors and Contexts are destroyed as ever, and the host's are whole.
    context_.reset();
    const Tensor two = Tensor::from_values(DType::kF32, {1, 1, 1, 1}, {2});
    const bool host =
        elements_of(attention(host_context(), two, two, two)) == std::vector<double>{2};
    std::exit((first ? 0 : 1) + (later ? 0 : 2) + (others ? 0 : 4) + (host ? 0 : 8));
  };
  EXPECT_EXIT(fault(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ladon::test
