// Reading a GPU's memory, and nothing else: the ceiling of decoding there.
#pragma once

#include <cstdint>

#include "ladon/context.h"

namespace ladon::bench {

/// Enqueues a kernel that reads `bytes` of the Context's GPU once; a multiple of 16.
void read_device_memory(const Context& context, void* data, std::int64_t bytes);

}  // namespace ladon::bench
