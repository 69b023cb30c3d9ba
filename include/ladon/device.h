// Where memory lives and work runs: the CPU, or one of several GPUs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ladon/export.h"

namespace ladon {

enum class Device : std::uint8_t { kCpu, kCuda };

/// One device. A Device alone means its first.
struct LADON_API DeviceId {
  Device device = Device::kCpu;
  int index = 0;  // 0 for the CPU

  constexpr DeviceId() = default;
  constexpr DeviceId(Device which, int number = 0) noexcept : device(which), index(number) {}

  bool operator==(const DeviceId&) const = default;
  bool is_cpu() const noexcept { return device == Device::kCpu; }
  /// "cpu", "cuda:0".
  std::string to_string() const;
};

/// One GPU of this machine.
struct DeviceInfo {
  DeviceId id;
  std::string name;              // "NVIDIA H200"
  std::string capability;        // "9.0"
  std::size_t memory_bytes = 0;  // all of it
  std::size_t free_bytes = 0;    // not in use by any program
  int num_multiprocessors = 0;
};

struct DeviceList {
  std::vector<DeviceInfo> devices;
  /// Why there are none; empty where there are some.
  std::string reason;
};

/// The GPUs that a Context can be made for. Does not throw where there are none.
LADON_API DeviceList list_devices();

}  // namespace ladon
