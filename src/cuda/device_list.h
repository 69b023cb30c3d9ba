// Which GPUs there are, and why one cannot be used.
#pragma once

#include <string_view>

#include "ladon/device.h"

namespace ladon::cuda {

DeviceList list_devices();

/// Throws Error where there is no GPU with this index, or it cannot run Ladon's kernels.
void check_device(std::string_view operation, int index);

}  // namespace ladon::cuda
