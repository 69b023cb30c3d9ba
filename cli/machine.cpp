#include "machine.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>

#include "failure.h"
#include "units.h"

namespace ladon::cli {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

/// The number behind a name in lines such as "MemAvailable:  123 kB" or "inactive_file 123".
std::optional<std::int64_t> number_after(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    std::int64_t number = 0;
    if (word == name && file >> number) return number;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return {};
}

std::optional<std::int64_t> only_number(const std::string& path) {
  std::ifstream file(path);
  std::int64_t number = 0;
  if (file >> number) return number;
  return {};
}

/// A version of control groups: where its memory controller is mounted, and its files' names.
struct MemoryGroups {
  std::string mount;
  std::string_view limit, used, files;
};

/// What the control group in this folder still allows. Pages of files that can be dropped are free.
std::int64_t rest_of_group(const MemoryGroups& groups, const std::string& folder) {
  const auto limit = only_number(folder + std::string(groups.limit));
  const auto used = only_number(folder + std::string(groups.used));
  if (!limit || !used) return kUnlimited;
  const std::int64_t files = number_after(folder + "/memory.stat", groups.files).value_or(0);
  return std::max<std::int64_t>(0, *limit - std::max<std::int64_t>(0, *used - files));
}

/// The group at `own` below the mount, and all above it.
std::int64_t rest_of_groups(const MemoryGroups& groups, std::string own) {
  std::int64_t rest = rest_of_group(groups, groups.mount);
  while (own.size() > 1) {
    rest = std::min(rest, rest_of_group(groups, groups.mount + own));
    own.erase(own.rfind('/'));
  }
  return rest;
}

/// Whether a list of words separated by commas has this one.
bool has_word(std::string_view list, std::string_view word) {
  while (!list.empty()) {
    const std::size_t end = list.find(',');
    if (list.substr(0, end) == word) return true;
    list = end == std::string_view::npos ? std::string_view() : list.substr(end + 1);
  }
  return false;
}

std::int64_t rest_of_address_space() {
  rlimit limit{};
  if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kUnlimited;
  const std::int64_t used = 1024 * number_after("/proc/self/status", "VmSize:").value_or(0);
  return std::max<std::int64_t>(0, static_cast<std::int64_t>(limit.rlim_cur) - used);
}

}  // namespace

std::int64_t rest_of_control_groups(const std::string& root) {
  std::int64_t rest = kUnlimited;
  std::ifstream file(root + "/proc/self/cgroup");
  // Lines of "number:controllers:path"; version 2 has number 0 and names no controllers.
  for (std::string line; std::getline(file, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string own = line.substr(second + 1);
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (line.starts_with("0::")) {
      rest = std::min(rest, rest_of_groups({root + "/sys/fs/cgroup", "/memory.max",
                                            "/memory.current", "inactive_file"},
                                           own));
    } else if (has_word(controllers, "memory")) {
      rest =
          std::min(rest, rest_of_groups({root + "/sys/fs/cgroup/memory", "/memory.limit_in_bytes",
                                         "/memory.usage_in_bytes", "total_inactive_file"},
                                        own));
    }
  }
  return rest;
}

std::string cpu_name() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t start = line.find_first_not_of(" \t", line.find(':') + 1);
    if (start != std::string::npos) return line.substr(start);
  }
  return "unknown";
}

std::string device_name(DeviceId device) {
  for (const DeviceInfo& gpu : list_devices().devices) {
    if (gpu.id == device) return gpu.name + " (" + device.to_string() + ")";
  }
  return device.is_cpu() ? cpu_name() : device.to_string();
}

std::string compiler_name() {
#if defined(__clang__)
  return "clang " + std::to_string(__clang_major__) + "." + std::to_string(__clang_minor__) + "." +
         std::to_string(__clang_patchlevel__);
#else
  return "gcc " + std::to_string(__GNUC__) + "." + std::to_string(__GNUC_MINOR__) + "." +
         std::to_string(__GNUC_PATCHLEVEL__);
#endif
}

std::int64_t available_memory() {
  std::int64_t available = kUnlimited;
  if (const auto kib = number_after("/proc/meminfo", "MemAvailable:")) available = *kib * 1024;
  return std::min({available, rest_of_control_groups(), rest_of_address_space()});
}

namespace {

/// `of` follows the words "of memory".
void require_room(std::string_view what, double bytes, std::int64_t available,
                  const std::string& of) {
  if (bytes <= static_cast<double>(available)) return;
  constexpr double kMost = 0x1p62;
  const std::string size = bytes < kMost ? "about " + format_bytes(static_cast<std::int64_t>(bytes))
                                         : "more than " + format_bytes(std::int64_t{1} << 62);
  throw Failure(std::string(what) + " needs " + size + " of memory" + of + "; " +
                format_bytes(available) + " are available");
}

}  // namespace

void require_memory(std::string_view what, double bytes) {
  require_room(what, bytes, available_memory(), "");
}

void require_memory(std::string_view what, double bytes, DeviceId device) {
  if (device.is_cpu()) return require_memory(what, bytes);
  for (const DeviceInfo& gpu : list_devices().devices) {
    if (gpu.id != device) continue;
    require_room(what, bytes, static_cast<std::int64_t>(gpu.free_bytes),
                 " of " + device.to_string());
  }
}

}  // namespace ladon::cli
