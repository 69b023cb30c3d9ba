// How many CPUs this process may use: its affinity mask and its container's CPU quota.
#pragma once

#include <functional>
#include <optional>
#include <string>

namespace ladon {

/// At least 1. Reads /proc and /sys.
int usable_cpu_count();

/// The content of a file, or nothing if it cannot be read.
using ReadFile = std::function<std::optional<std::string>(const std::string& path)>;

/// The CPU quota of this process's control groups (v2 and v1, from its own group up to the root),
/// rounded up to whole CPUs; nothing where there is none. All it knows it asks of `read_file`.
std::optional<int> cgroup_cpu_limit(const ReadFile& read_file);

}  // namespace ladon
