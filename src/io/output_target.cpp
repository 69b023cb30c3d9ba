#include "io/output_target.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>

#include "core/fail.h"

namespace ladon::io {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void refuse(std::string_view operation, const fs::path& target,
                         std::string_view what) {
  fail(ErrorCode::kIo, operation, target.string(), what);
}

[[noreturn]] void refuse_errno(std::string_view operation, const fs::path& target) {
  refuse(operation, target,
         "got \"" + std::generic_category().message(errno) + "\", expected to write to it");
}

/// The number that a link such as /dev/stdout or /dev/fd/3 leads to: a descriptor of this process.
/// Behind it may be a regular file, which the program that opened it goes on writing to, so it
/// must not be replaced either.
std::optional<int> own_descriptor(const fs::path& link) {
  std::error_code error;
  const fs::path folder =
      fs::canonical(link.parent_path().empty() ? "." : link.parent_path(), error);
  const std::string own = "/proc/" + std::to_string(::getpid());
  const std::string name = link.filename().string();
  if (error || (folder != own + "/fd" &&
                !(folder.string().starts_with(own + "/task/") && folder.filename() == "fd"))) {
    return {};
  }
  int number = -1;
  const auto [end, fault] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (fault != std::errc() || end != name.data() + name.size()) return {};
  return number;
}

}  // namespace

OutputTarget resolve_output(std::string_view operation, const fs::path& target) {
  fs::path path = target;
  constexpr int kMostLinks = 40;  // as Linux
  std::error_code error;
  for (int links = 0; fs::is_symlink(fs::symlink_status(path, error)); ++links) {
    if (links == kMostLinks) {
      refuse(operation, target, "got symbolic links in a circle, expected one that ends");
    }
    if (const auto number = own_descriptor(path)) {
      const int stream = ::fcntl(*number, F_DUPFD_CLOEXEC, 0);
      if (stream < 0) refuse_errno(operation, target);
      return {.stream = stream};
    }
    const fs::path next = fs::read_symlink(path, error);
    if (error) refuse(operation, target, "got \"" + error.message() + "\", expected a link");
    path = next.is_absolute() ? next : path.parent_path() / next;
  }
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0 || S_ISREG(status.st_mode)) return {.path = path};
  if (!S_ISFIFO(status.st_mode) && !S_ISCHR(status.st_mode)) {
    refuse(operation, target,
           std::string("got ") +
               (S_ISDIR(status.st_mode)   ? "a folder"
                : S_ISBLK(status.st_mode) ? "a block device"
                                          : "a socket") +
               ", expected a file, a new name, a pipe or a character device");
  }
  const int stream = ::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY);
  if (stream < 0) refuse_errno(operation, target);
  return {.stream = stream};
}

}  // namespace ladon::io
