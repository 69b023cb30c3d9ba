#include "ladon/device.h"

namespace ladon {

std::string DeviceId::to_string() const {
  switch (device) {
    case Device::kCpu: return "cpu";
    case Device::kCuda: return "cuda:" + std::to_string(index);
  }
  return "unknown";
}

}  // namespace ladon
