// The memory that control groups still allow, from files as systems have them.

#include "machine.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <limits>

#include "io/io_support.h"

namespace ladon::test {
namespace {

class ControlGroups : public testing::Test {
 protected:
  void write(const std::string& path, const std::string& content) {
    const std::filesystem::path file = root_.path() / path;
    std::filesystem::create_directories(file.parent_path());
    write_bytes(file, content);
  }
  std::int64_t rest() const { return cli::rest_of_control_groups(root_.path().string()); }

  TempFolder root_;
};

TEST_F(ControlGroups, None) {
  EXPECT_EQ(rest(), std::numeric_limits<std::int64_t>::max());
  write("proc/self/cgroup", "garbage\n1:cpu\n");
  EXPECT_EQ(rest(), std::numeric_limits<std::int64_t>::max());
}

TEST_F(ControlGroups, Version2) {
  write("proc/self/cgroup", "0::/a/b\n");
  write("sys/fs/cgroup/a/memory.max", "1000\n");
  write("sys/fs/cgroup/a/memory.current", "700\n");
  write("sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 100\n");
  write("sys/fs/cgroup/a/b/memory.max", "max\n");
  EXPECT_EQ(rest(), 400);
}

TEST_F(ControlGroups, Version1) {
  write("proc/self/cgroup", "12:cpu,cpuacct:/a\n5:hugetlb,memory:/a/b\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5000\n");
  write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "1000\n");
  write("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "900\n");
  write("sys/fs/cgroup/memory/a/memory.stat", "inactive_file 1\ntotal_inactive_file 50\n");
  EXPECT_EQ(rest(), 150);
}

// Docker mounts a container's own group as the root, and its path is not to be found there.
TEST_F(ControlGroups, Version1InAContainer) {
  write("proc/self/cgroup", "5:memory:/docker/0123\n");
  write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3000\n");
  write("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
  EXPECT_EQ(rest(), 2000);
}

}  // namespace
}  // namespace ladon::test
