#include "ladon/device.h"

#include "core/device_memory.h"

namespace ladon {

std::string DeviceId::to_string() const {
  switch (device) {
    case Device::kCpu: return "cpu";
    case Device::kCuda: return "cuda:" + std::to_string(index);
  }
  return "unknown";
}

std::string size_that_fits(const DeviceMemory& memory) {
  std::string text = "a size that fits the memory";
  if (memory.device().is_cpu()) return text;
  text += " of " + memory.device().to_string();
  const std::optional<std::size_t> free = memory.free_bytes();
  return free ? text + ", of which " + std::to_string(*free) + " bytes are free" : text;
}

}  // namespace ladon
