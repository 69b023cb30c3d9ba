// Bytes that can be opened by a path and lie in memory alone: for programs that open millions of
// files.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

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

  void set(const std::uint8_t* data, std::size_t size) {
    if (::ftruncate(descriptor_, 0) != 0) std::abort();
    if (::pwrite(descriptor_, data, size, 0) != static_cast<ssize_t>(size)) std::abort();
  }

 private:
  int descriptor_;
};

}  // namespace ladon::test
