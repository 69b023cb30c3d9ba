// FullDisk: writes that fail as on a disk that is nearly full.
#pragma once

#include <sys/resource.h>

#include <csignal>

namespace ladon::test {

/// Files of this process can grow to `bytes`, as on a disk that is nearly full.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) {
    // Without this, the signal that comes with the failure would end the program.
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit limit{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &limit);
  }
  ~FullDisk() {
    setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

}  // namespace ladon::test
