#include "output_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
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
  // Only trying tells: permissions, read-only and virtual file systems all look alike from outside.
  const HeldSignals held;
  OutputFile(option, path, {});
}

OutputFile::OutputFile(std::string_view option, const fs::path& path, std::string_view content)
    : option_(option), path_(path), temporary_(path) {
  temporary_ += ".tmp" + std::to_string(::getpid());
  const int descriptor = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(option_, path_, errno);
  const bool written = write_all(descriptor, content);
  int error = written ? 0 : errno;
  if (::close(descriptor) != 0 && error == 0) error = errno;
  if (error == 0) return;
  ::unlink(temporary_.c_str());
  refuse(option_, path_, error);
}

OutputFile::~OutputFile() {
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void OutputFile::commit() {
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) refuse(option_, path_, errno);
  temporary_.clear();
}

}  // namespace ladon::cli
