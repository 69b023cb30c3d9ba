// A device that is not there: the CPU's kernels over memory that the host cannot touch.
//
// Its memory is protected pages, which open only while one of its Backend's operations runs.
// Library code that reads or writes a tensor by itself, outside an operation, ends the test with a
// fault; an operation that is given a tensor of the host's ends it with a message. New memory is
// poisoned.
#pragma once

#include "ladon/context.h"
#include "ladon/device.h"

namespace ladon::test {

/// What the device is called: a GPU with a number that no machine has.
inline constexpr DeviceId kPretendedDevice{Device::kCuda, 77};

/// A Context on the device. All of them share its memory.
Context pretended_context(const ContextOptions& options = {});

/// Bytes that tensors and workspaces hold there now.
std::size_t pretended_bytes_in_use();

}  // namespace ladon::test
