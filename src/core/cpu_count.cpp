// A container's quota does not show in the affinity mask: a process that is allowed two CPUs' worth
// of time on a host of 96 sees 96 CPUs, and 96 threads would be throttled in turns.
#include "core/cpu_count.h"

#include <sched.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <string_view>
#include <thread>
#include <vector>

namespace ladon {
namespace {

constexpr int kMaxInt = std::numeric_limits<int>::max();

/// Cuts the text up to the separator off the front of `text` and returns it; all of it where there
/// is not a separator.
std::string_view take_until(std::string_view& text, char separator) {
  const std::size_t end = text.find(separator);
  const std::string_view front = text.substr(0, end);
  text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  return front;
}

bool list_contains(std::string_view list, std::string_view wanted) {
  while (!list.empty()) {
    if (take_until(list, ',') == wanted) return true;
  }
  return false;
}

std::optional<std::int64_t> parse_number(std::string_view text) {
  while (!text.empty() && (text.back() == '\n' || text.back() == ' ')) text.remove_suffix(1);
  std::int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || text.empty()) return {};
  return value;
}

/// CPUs that `quota` microseconds in each `period` make; nothing where that is not a limit.
std::optional<int> cpus_of(std::optional<std::int64_t> quota, std::optional<std::int64_t> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return {};
  const std::int64_t cpus = *quota / *period + (*quota % *period != 0 ? 1 : 0);
  return static_cast<int>(std::min<std::int64_t>(cpus, kMaxInt));
}

/// cgroup v2's cpu.max: "200000 100000", or "max 100000".
std::optional<int> limit_v2(const ReadFile& read_file, const std::string& directory) {
  const std::optional<std::string> text = read_file(directory + "/cpu.max");
  if (!text) return {};
  std::string_view rest = *text;
  const std::optional<std::int64_t> quota = parse_number(take_until(rest, ' '));
  return cpus_of(quota, parse_number(rest));
}

/// cgroup v1: two files with one number each; a quota of -1 is none.
std::optional<int> limit_v1(const ReadFile& read_file, const std::string& directory) {
  const std::optional<std::string> quota = read_file(directory + "/cpu.cfs_quota_us");
  const std::optional<std::string> period = read_file(directory + "/cpu.cfs_period_us");
  if (!quota || !period) return {};
  return cpus_of(parse_number(*quota), parse_number(*period));
}

/// The process's group in the unified (v2) hierarchy or in that of v1's cpu controller, from
/// /proc/self/cgroup: lines of "number:controllers:path".
std::optional<std::string> group_path(std::string_view text, bool unified) {
  while (!text.empty()) {
    std::string_view line = take_until(text, '\n');
    const std::string_view number = take_until(line, ':');
    const std::string_view controllers = take_until(line, ':');
    if (!line.starts_with('/')) continue;
    if (unified ? number == "0" && controllers.empty() : list_contains(controllers, "cpu")) {
      return std::string(line);
    }
  }
  return {};
}

/// mountinfo writes blanks and backslashes in a path as \ and three octal digits.
std::string unescape(std::string_view text) {
  const auto is_octal = [](char c) { return c >= '0' && c <= '7'; };
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\\' && i + 3 < text.size() && is_octal(text[i + 1]) && is_octal(text[i + 2]) &&
        is_octal(text[i + 3])) {
      const int code = (text[i + 1] - '0') * 64 + (text[i + 2] - '0') * 8 + (text[i + 3] - '0');
      result += static_cast<char>(code);
      i += 3;
    } else {
      result += text[i];
    }
  }
  return result;
}

struct Mount {
  std::string root;   // the group that is seen at `point`
  std::string point;  // where
};

/// Where a hierarchy is mounted, from /proc/self/mountinfo: lines of "id parent device root point
/// options [tags] - type source options".
std::optional<Mount> find_mount(std::string_view text, bool unified) {
  while (!text.empty()) {
    std::string_view line = take_until(text, '\n');
    const std::size_t dash = line.find(" - ");
    if (dash == std::string_view::npos) continue;
    std::string_view tail = line.substr(dash + 3);
    const std::string_view type = take_until(tail, ' ');
    take_until(tail, ' ');
    if (type != (unified ? "cgroup2" : "cgroup")) continue;
    if (!unified && !list_contains(tail, "cpu")) continue;
    for (int skipped = 0; skipped < 3; ++skipped) take_until(line, ' ');
    std::string root = unescape(take_until(line, ' '));
    return Mount{std::move(root), unescape(take_until(line, ' '))};
  }
  return {};
}

/// The directories whose limits bind the group: its own and those above it, up to the mount.
std::vector<std::string> directories_of(const Mount& mount, std::string group) {
  const std::string root = mount.root == "/" ? "" : mount.root;
  // Under a container's own mount the group is that root or is below it. A group outside of what
  // is mounted ("/../x") leaves only the mount itself to look at.
  const bool below = group.compare(0, root.size(), root) == 0 &&
                     (group.size() == root.size() || group[root.size()] == '/') &&
                     group.find("/..") == std::string::npos;
  std::string relative = below ? group.substr(root.size()) : std::string();
  std::vector<std::string> directories;
  while (!relative.empty()) {
    if (relative != "/") directories.push_back(mount.point + relative);
    relative.resize(relative.rfind('/'));
  }
  directories.push_back(mount.point);
  return directories;
}

int affinity_cpu_count() {
  // The kernel refuses a mask smaller than its own, whose size it does not tell.
  for (int capacity = CPU_SETSIZE; capacity <= (1 << 20); capacity *= 2) {
    cpu_set_t* const set = CPU_ALLOC(static_cast<std::size_t>(capacity));
    if (set == nullptr) break;
    const std::size_t bytes = CPU_ALLOC_SIZE(static_cast<std::size_t>(capacity));
    const int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : 0;
    CPU_FREE(set);
    if (count > 0) return count;
  }
  return static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
}

std::optional<std::string> read_real_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return {};
  return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

std::optional<int> cgroup_cpu_limit(const ReadFile& read_file) {
  const std::optional<std::string> groups = read_file("/proc/self/cgroup");
  const std::optional<std::string> mounts = read_file("/proc/self/mountinfo");
  if (!groups || !mounts) return {};
  std::optional<int> lowest;
  for (const bool unified : {true, false}) {
    const std::optional<std::string> group = group_path(*groups, unified);
    const std::optional<Mount> mount = find_mount(*mounts, unified);
    if (!group || !mount) continue;
    for (const std::string& directory : directories_of(*mount, *group)) {
      const std::optional<int> limit =
          unified ? limit_v2(read_file, directory) : limit_v1(read_file, directory);
      if (limit) lowest = std::min(lowest.value_or(kMaxInt), *limit);
    }
  }
  return lowest;
}

int usable_cpu_count() {
  const int allowed = affinity_cpu_count();
  return std::max(1, std::min(allowed, cgroup_cpu_limit(read_real_file).value_or(allowed)));
}

}  // namespace ladon
