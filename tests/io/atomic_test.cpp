// Writing is all or nothing: whatever fails, an older file is as it was and nothing else remains.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "io/io_support.h"
#include "ladon/npy.h"
#include "ladon/safetensors.h"
#include "support/error_of.h"
#include "support/full_disk.h"

namespace ladon {
namespace {

using namespace test;

class Atomic : public testing::TestWithParam<bool> {
 protected:
  void write(const std::filesystem::path& path) {
    if (GetParam()) {
      write_npy(path, values_);
    } else {
      write_safetensors(path, std::vector<SafetensorsItem>{{"a", values_}});
    }
  }
  std::string prefix(const std::filesystem::path& path) {
    return std::string(GetParam() ? "write_npy: " : "write_safetensors: ") + path.string() + ": ";
  }

  TempFolder temp_;
  Tensor values_ = counting_bytes(DType::kF64, {1000});
};

TEST_P(Atomic, ReplacesAnOlderFileAndKeepsItsPermissions) {
  write_bytes(temp_ / "x", "old");
  ASSERT_EQ(::chmod((temp_ / "x").c_str(), 0640), 0);
  write(temp_ / "x");
  EXPECT_GT(std::filesystem::file_size(temp_ / "x"), 8000U);
  struct stat status {};
  ASSERT_EQ(::stat((temp_ / "x").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777U, 0640U);
  EXPECT_EQ(temp_.files(), std::vector<std::string>{"x"});
}

TEST_P(Atomic, AFullDiskLeavesTheOldFile) {
  write_bytes(temp_ / "x", "old");
  for (const rlim_t limit : std::initializer_list<rlim_t>{0, 5, 100, 4096, 8000}) {
    const FullDisk full(limit);
    const std::string message = error_of([&] { write(temp_ / "x"); }, ErrorCode::kIo);
    EXPECT_TRUE(message.starts_with(prefix(temp_ / "x") + "got \"File too large\", expected to"))
        << message;
    EXPECT_EQ(temp_.files(), std::vector<std::string>{"x"});
  }
  EXPECT_EQ(read_bytes(temp_ / "x"), "old");
}

TEST_P(Atomic, FoldersThatAreNotThere) {
  const std::filesystem::path path = temp_ / "none" / "x";
  EXPECT_EQ(
      error_of([&] { write(path); }, ErrorCode::kIo),
      prefix(path) + "got \"No such file or directory\", expected to create a file next to it");
  EXPECT_EQ(temp_.files(), std::vector<std::string>());
}

TEST_P(Atomic, AFolderIsNotReplaced) {
  EXPECT_EQ(error_of([&] { write(temp_.path()); }, ErrorCode::kIo),
            prefix(temp_.path()) +
                "got a folder, expected a file, a new name, a pipe or a character device");
  EXPECT_EQ(temp_.files(), std::vector<std::string>());
}

TEST_P(Atomic, LinksStayAndTheirTargetsAreWritten) {
  std::filesystem::create_directory(temp_ / "folder");
  write_bytes(temp_ / "folder" / "old", "old");
  std::filesystem::create_symlink("folder/old", temp_ / "first");
  std::filesystem::create_symlink("first", temp_ / "second");
  std::filesystem::create_symlink("folder/new", temp_ / "dangling");
  write(temp_ / "plain");
  const std::string expected = read_bytes(temp_ / "plain");
  write(temp_ / "second");
  write(temp_ / "dangling");
  for (const char* link : {"first", "second", "dangling"}) {
    EXPECT_TRUE(std::filesystem::is_symlink(temp_ / link)) << link;
  }
  EXPECT_EQ(read_bytes(temp_ / "folder" / "old"), expected);
  EXPECT_EQ(read_bytes(temp_ / "folder" / "new"), expected);
  std::filesystem::create_symlink("circle", temp_ / "circle");
  EXPECT_EQ(error_of([&] { write(temp_ / "circle"); }, ErrorCode::kIo),
            prefix(temp_ / "circle") + "got symbolic links in a circle, expected one that ends");
}

TEST_P(Atomic, PipesAndDevicesAreWrittenAndStay) {
  write("/dev/null");
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
  const std::string message = error_of([&] { write("/dev/full"); }, ErrorCode::kIo);
  EXPECT_TRUE(message.starts_with(prefix("/dev/full") + "got \"No space left on device\""))
      << message;
  write(temp_ / "plain");
  const std::string expected = read_bytes(temp_ / "plain");
  const std::filesystem::path pipe = temp_ / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] { received = read_bytes(pipe); });
  write(pipe);
  reader.join();
  EXPECT_EQ(received, expected);
  EXPECT_TRUE(std::filesystem::is_fifo(pipe));
}

TEST_P(Atomic, ADescriptorsFileIsNotReplaced) {
  const int descriptor = ::open((temp_ / "log").c_str(), O_RDWR | O_CREAT, 0600);
  ASSERT_GE(descriptor, 0);
  ASSERT_EQ(::write(descriptor, "before", 6), 6);
  write("/dev/fd/" + std::to_string(descriptor));
  ASSERT_EQ(::write(descriptor, "after", 5), 5);
  ::close(descriptor);
  write(temp_ / "plain");
  EXPECT_EQ(read_bytes(temp_ / "log"), "before" + read_bytes(temp_ / "plain") + "after");
}

TEST_P(Atomic, ANameWithoutAFolder) {
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(temp_.path());
  EXPECT_NO_THROW(write("x"));
  std::filesystem::current_path(before);
  EXPECT_EQ(temp_.files(), std::vector<std::string>{"x"});
}

INSTANTIATE_TEST_SUITE_P(Formats, Atomic, testing::Values(false, true), [](const auto& parameter) {
  return std::string(parameter.param ? "npy" : "safetensors");
});

}  // namespace
}  // namespace ladon
