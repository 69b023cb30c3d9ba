#include "output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <string>
#include <system_error>

#include "failure.h"
#include "signals.h"

namespace ladon::cli {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(std::string_view option, const fs::path& path, int error) {
  throw Failure(std::string(option) + ": cannot write " + path.string() + ": " +
                std::generic_category().message(error));
}

/// False with errno set.
bool write_all(int descriptor, std::string_view content) {
  while (!content.empty()) {
    const ssize_t written = ::write(descriptor, content.data(), content.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return false;
    content.remove_prefix(static_cast<std::size_t>(written));
  }
  return ::fsync(descriptor) == 0;
}

}  // namespace

void check_writable(std::string_view option, const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) refuse(option, path, EISDIR);
  const fs::path folder = path.has_parent_path() ? path.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) refuse(option, path, error ? error.value() : ENOTDIR);
  if (::access(folder.c_str(), W_OK | X_OK) != 0) refuse(option, path, errno);
}

void write_file(std::string_view option, const fs::path& path, std::string_view content) {
  const HeldSignals held;
  fs::path temporary = path;
  temporary += ".tmp" + std::to_string(::getpid());
  const int descriptor = ::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(option, path, errno);
  bool good = write_all(descriptor, content);
  int error = errno;
  if (::close(descriptor) != 0 && good) {
    good = false;
    error = errno;
  }
  if (good && ::rename(temporary.c_str(), path.c_str()) != 0) {
    good = false;
    error = errno;
  }
  if (good) return;
  ::unlink(temporary.c_str());
  refuse(option, path, error);
}

}  // namespace ladon::cli
