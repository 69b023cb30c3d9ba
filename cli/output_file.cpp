#include "output_file.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
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
  return true;
}

/// The end of a chain of symbolic links; or the link itself where it names an open descriptor, such
/// as /dev/fd/3: what that leads to belongs to the program that opened it.
fs::path without_links(std::string_view option, const fs::path& path) {
  constexpr int kMostLinks = 40;  // as Linux
  fs::path end = path;
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(end, error)); ++links) {
    if (links == kMostLinks) refuse(option, path, ELOOP);
    const fs::path folder = fs::weakly_canonical(fs::absolute(end).parent_path(), error);
    if (folder == "/proc/" + std::to_string(::getpid()) + "/fd") break;
    const fs::path next = fs::read_symlink(end, error);
    end = next.is_absolute() ? next : end.parent_path() / next;
  }
  return end;
}

/// What cannot be renamed over: pipes, devices, open descriptors.
bool is_stream(const fs::path& path) {
  std::error_code error;
  if (fs::is_symlink(fs::symlink_status(path, error))) return true;
  return fs::is_fifo(path, error) || fs::is_character_file(path, error);
}

/// What stands between a target's name and the number of the process that writes it, as the
/// library's own files have it.
constexpr std::string_view kTemporary = ".tmp-";

/// Removes what runs that were killed have left next to the target.
void remove_leftovers(const fs::path& target) {
  const std::string prefix = target.filename().string() + std::string(kTemporary);
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(
           target.has_parent_path() ? target.parent_path() : fs::path("."), error)) {
    const std::string name = entry.path().filename().string();
    pid_t process = 0;
    if (!name.starts_with(prefix)) continue;
    const char* const end = name.data() + name.size();
    const auto [rest, problem] = std::from_chars(name.data() + prefix.size(), end, process);
    if (problem != std::errc{} || rest == end || *rest != '-' || process <= 0) continue;
    if (::kill(process, 0) != 0 && errno == ESRCH) fs::remove(entry.path(), error);
  }
}

}  // namespace

void check_writable(std::string_view option, const fs::path& path) {
  std::error_code error;
  if (fs::is_directory(path, error)) refuse(option, path, EISDIR);
  const fs::path target = without_links(option, path);
  if (is_stream(target)) {
    if (::access(target.c_str(), W_OK) != 0) refuse(option, path, errno);
    return;
  }
  const fs::path folder = target.has_parent_path() ? target.parent_path() : fs::path(".");
  if (!fs::is_directory(folder, error)) refuse(option, path, error ? error.value() : ENOTDIR);
  if (fs::exists(target, error) && !fs::is_regular_file(target, error))
    refuse(option, path, EINVAL);
  // Only trying tells: permissions, read-only and virtual file systems all look alike from outside.
  const HeldSignals held;
  OutputFile(option, path, {});
}

void check_different(std::string_view option, const fs::path& path, std::string_view other_option,
                     const fs::path& other) {
  std::error_code error;
  if (!fs::equivalent(path, other, error) &&
      fs::weakly_canonical(path, error) != fs::weakly_canonical(other, error)) {
    return;
  }
  throw Failure(std::string(option) + ": cannot write " + path.string() + ": " +
                std::string(other_option) + " writes the same file");
}

OutputFile::OutputFile(std::string_view option, const fs::path& path, std::string_view content)
    : option_(option), path_(without_links(option, path)) {
  if (is_stream(path_)) {
    stream_content_ = content;
    return;
  }
  remove_leftovers(path_);
  temporary_ = path_;
  temporary_ += std::string(kTemporary) + std::to_string(::getpid()) + "-0";
  const int descriptor = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
  if (descriptor < 0) refuse(option_, path_, errno);
  struct stat status {};
  if (::stat(path_.c_str(), &status) == 0) {
    static_cast<void>(::fchmod(descriptor, status.st_mode & 0777U));
  }
  const bool written = write_all(descriptor, content) && ::fsync(descriptor) == 0;
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
  if (temporary_.empty()) {
    std::error_code none;
    // A link that was not followed names a descriptor by its number.
    const int descriptor = fs::is_symlink(fs::symlink_status(path_, none))
                               ? ::fcntl(std::stoi(path_.filename().string()), F_DUPFD_CLOEXEC, 0)
                               : ::open(path_.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
    if (descriptor < 0) refuse(option_, path_, errno);
    const int error = write_all(descriptor, stream_content_) ? 0 : errno;
    if (::close(descriptor) != 0 || error != 0) refuse(option_, path_, error != 0 ? error : errno);
    return;
  }
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) refuse(option_, path_, errno);
  temporary_.clear();
}

}  // namespace ladon::cli
