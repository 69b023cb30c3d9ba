// Whose memory a pointer is to, as CUDA knows it.
#pragma once

#include "ladon/device.h"

namespace ladon::cuda {

/// The device whose memory it is, or `claimed` where that can use it or the owner is unknown. Quick
/// for memory that was looked up before. CUDA is not started by it.
DeviceId owner_of(const void* data, DeviceId claimed) noexcept;

}  // namespace ladon::cuda
