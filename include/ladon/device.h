// Where memory lives and work runs: the CPU, or one of several GPUs.
#pragma once

#include <cstdint>
#include <string>

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

}  // namespace ladon
