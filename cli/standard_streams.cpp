#include "standard_streams.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>
#include <vector>

#include "failure.h"
#include "machine.h"

namespace ladon::cli {
namespace {

constexpr std::size_t kChunk = std::size_t{1} << 20;

// The real standard output, once a file has claimed it.
int claimed = -1;

[[noreturn]] void fail_errno(std::string_view option, const std::string& path, int error) {
  throw Failure(std::string(option) + ": cannot read " + path + ": " +
                std::generic_category().message(error));
}

/// Copies all that comes into a file in memory, and returns its descriptor.
int collect(std::string_view option, const std::string& path, int from) {
  const int memory = ::memfd_create("ladon-input", MFD_CLOEXEC);
  if (memory < 0) fail_errno(option, path, errno);
  std::vector<char> buffer(kChunk);
  while (true) {
    const ssize_t got = ::read(from, buffer.data(), buffer.size());
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_errno(option, path, errno);
    if (got == 0) return memory;
    // A stream may have no end: better an error than a machine without memory.
    require_memory(std::string(option) + ": " + path, static_cast<double>(got));
    for (ssize_t done = 0; done < got;) {
      const ssize_t written =
          ::write(memory, buffer.data() + done, static_cast<std::size_t>(got - done));
      if (written < 0 && errno != EINTR) fail_errno(option, path, errno);
      done += std::max<ssize_t>(written, 0);
    }
  }
}

std::string path_of(int descriptor) { return "/proc/self/fd/" + std::to_string(descriptor); }

}  // namespace

bool is_standard_output(std::string_view path) {
  return path == "-" || path == "/dev/stdout" || path == "/dev/fd/1" || path == "/proc/self/fd/1";
}

void claim_standard_output(std::string_view command, std::initializer_list<std::string_view> paths,
                           bool json) {
  const auto claims = std::count_if(paths.begin(), paths.end(), is_standard_output);
  if (claims == 0) return;
  if (claims > 1 || json) {
    throw UsageError(std::string(command) + ": standard output cannot take " +
                     (claims > 1 ? "two files" : "both a file and --json"));
  }
  std::fflush(stdout);
  claimed = ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
  if (claimed < 0 || ::dup2(STDERR_FILENO, STDOUT_FILENO) < 0) {
    throw Failure(std::string(command) +
                  ": cannot write to standard output: " + std::generic_category().message(errno));
  }
}

std::string output_path(const std::string& path) {
  return is_standard_output(path) ? path_of(claimed) : path;
}

std::string shown_output(const std::string& path) {
  return is_standard_output(path) ? "to standard output" : path;
}

std::string input_path(std::string_view option, const std::string& path) {
  if (path == "-") return path_of(collect(option, "standard input", STDIN_FILENO));
  struct stat status {};
  const bool is_stream =
      ::stat(path.c_str(), &status) == 0 && (S_ISFIFO(status.st_mode) || S_ISCHR(status.st_mode));
  if (!is_stream) return path;
  const int from = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOCTTY);
  if (from < 0) fail_errno(option, path, errno);
  const int memory = collect(option, path, from);
  ::close(from);
  return path_of(memory);
}

std::string with_name(std::string message, const std::string& opened, const std::string& name) {
  if (opened == name) return message;
  const std::string shown = name == "-" ? "standard input" : name;
  for (std::size_t at = message.find(opened); at != std::string::npos;
       at = message.find(opened, at + shown.size())) {
    message.replace(at, opened.size(), shown);
  }
  return message;
}

}  // namespace ladon::cli
