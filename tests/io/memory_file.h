// Bytes that can be opened by a path and are in memory alone: for tests that open thousands of
// files and fuzzers that open millions.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace ladon::test {

class MemoryFile {
 public:
  MemoryFile() : descriptor_(::memfd_create("ladon-fuzz", MFD_CLOEXEC)) {
    if (descriptor_ < 0) std::abort();
  }
  ~MemoryFile() { ::close(descriptor_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;

  std::string path() const { return "/proc/self/fd/" + std::to_string(descriptor_); }

  void set(std::string_view bytes) {
    if (::ftruncate(descriptor_, 0) != 0) std::abort();
    const ssize_t written = ::pwrite(descriptor_, bytes.data(), bytes.size(), 0);
    if (written != static_cast<ssize_t>(bytes.size())) std::abort();
  }

 private:
  int descriptor_;
};

}  // namespace ladon::test
