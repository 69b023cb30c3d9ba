// list_devices(), and Contexts on GPUs that are not there: on every machine, in every build.
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "ladon/context.h"
#include "ladon/device.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

std::string context_error(int index, ErrorCode code) {
  return error_of([=] { Context(ContextOptions{.device = Device::kCuda, .device_index = index}); },
                  code);
}

TEST(DeviceListTest, HasDevicesOrSaysWhyNot) {
  const DeviceList list = list_devices();
  EXPECT_EQ(list.devices.empty(), !list.reason.empty());
  for (std::size_t i = 0; i < list.devices.size(); ++i) {
    const DeviceInfo& device = list.devices[i];
    EXPECT_EQ(device.id, DeviceId(Device::kCuda, static_cast<int>(i)));
    EXPECT_NE(device.name, "");
    EXPECT_NE(device.capability.find('.'), std::string::npos) << device.capability;
    EXPECT_GT(device.memory_bytes, std::size_t{1} << 30);
    EXPECT_LE(device.free_bytes, device.memory_bytes);
    EXPECT_GT(device.num_multiprocessors, 0);
  }
}

TEST(DeviceListTest, AContextThatCannotBeHadSaysWhy) {
  const DeviceList list = list_devices();
  if (list.devices.empty()) {
    for (const int index : {0, 1, -1}) {
      EXPECT_EQ(context_error(index, ErrorCode::kUnsupported),
                "Context: device: got cuda, expected cpu: " + list.reason);
    }
    return;
  }
  const auto count = static_cast<int>(list.devices.size());
  for (const int index : {-1, count, 1000}) {
    EXPECT_EQ(context_error(index, ErrorCode::kInvalidArgument),
              "Context: device_index: got " + std::to_string(index) + ", expected 0 to " +
                  std::to_string(count - 1));
  }
}

TEST(DeviceListTest, ManyThreadsMayAsk) {
  const std::size_t count = list_devices().devices.size();
  std::vector<std::thread> threads;
  std::vector<std::size_t> counts(8);
  for (std::size_t& each : counts) {
    threads.emplace_back([&each] { each = list_devices().devices.size(); });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(counts, std::vector<std::size_t>(8, count));
}

}  // namespace
}  // namespace ladon::test
