// What this machine is, and how much memory it can still give.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "ladon/device.h"

namespace ladon::cli {

/// "AMD EPYC 9B14"; "unknown" where the system does not tell.
std::string cpu_name();
/// That, or the name of a GPU: "NVIDIA H200 (cuda:0)".
std::string device_name(DeviceId device);
/// Of the CLI, which is that of the library it was built with: "gcc 12.2.0".
std::string compiler_name();

/// Bytes that this process can still take without swapping or being killed: what the system has
/// available, or the rest of its control group's or its own limit where that is less.
std::int64_t available_memory();

/// What the memory limits of this process's control groups, of version 1 or 2, still allow. The
/// system's files are looked for below `root`.
std::int64_t rest_of_control_groups(const std::string& root = {});

/// Throws Failure where more would be needed than is available: "what needs about 1.2 TiB of
/// memory; 15.1 GiB are available". `bytes` is a double, because the request may be absurd.
void require_memory(std::string_view what, double bytes);
/// The same of a device's own memory.
void require_memory(std::string_view what, double bytes, DeviceId device);

}  // namespace ladon::cli
