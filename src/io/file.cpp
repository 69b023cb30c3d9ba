#include "io/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <memory>
#include <system_error>

#include "io/output_target.h"

namespace ladon::io {
namespace {

std::string text_of_errno(int error) { return std::generic_category().message(error); }

/// One call moves at most this much: some systems refuse more than 2 GiB at once.
constexpr std::size_t kMaxTransfer = std::size_t{1} << 30;

/// The folder's own record of a rename must reach the disk too. Some file systems cannot do this
/// for folders; the file's bytes are safe by then, so a refusal is not a failure.
void sync_folder(const std::filesystem::path& folder) noexcept {
  const int descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return;
  static_cast<void>(::fsync(descriptor));
  ::close(descriptor);
}

/// What stands between a target's name and the number of the process that writes it.
constexpr std::string_view kTemporary = ".tmp-";

/// Whether no process writes to this file: a writer holds a lock on it for as long as it lives.
bool is_abandoned(const std::filesystem::path& path, pid_t writer) noexcept {
  if (::kill(writer, 0) == 0 || errno != ESRCH) return false;
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
  if (descriptor < 0) return false;
  const bool free = ::flock(descriptor, LOCK_EX | LOCK_NB) == 0;
  ::close(descriptor);
  return free;
}

/// Removes what processes that were killed have left next to the target. Nothing here is a failure:
/// the next save tries again.
void remove_leftovers(const std::filesystem::path& target) {
  const std::string prefix = target.filename().string().append(kTemporary);
  const std::filesystem::path folder = target.parent_path();
  const std::unique_ptr<DIR, int (*)(DIR*)> files(::opendir(folder.empty() ? "." : folder.c_str()),
                                                  ::closedir);
  if (files == nullptr) return;
  // NOLINTNEXTLINE(concurrency-mt-unsafe): unsafe only where threads share the folder's stream
  while (const dirent* const file = ::readdir(files.get())) {
    const std::string_view name = file->d_name;
    if (!name.starts_with(prefix)) continue;
    pid_t writer = 0;
    const char* const name_end = name.data() + name.size();
    const auto [rest, error] = std::from_chars(name.data() + prefix.size(), name_end, writer);
    if (error != std::errc{} || writer <= 0 || rest == name_end || *rest != '-') continue;
    const std::filesystem::path path = folder / name;
    if (is_abandoned(path, writer)) ::unlink(path.c_str());
  }
}

}  // namespace

std::string in_quotes(std::string_view text) {
  constexpr std::size_t kMax = 80;
  constexpr std::string_view kHex = "0123456789abcdef";
  std::size_t length = std::min(text.size(), kMax);
  // A cut within a character of several bytes would leave half of it.
  const auto continues = [&](std::size_t i) {
    return (static_cast<unsigned char>(text[i]) & 0xc0U) == 0x80U;
  };
  while (length < text.size() && length > 0 && continues(length)) --length;
  std::string result = "\"";
  for (const char c : text.substr(0, length)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      result += {'\\', 'x', kHex[byte >> 4U], kHex[byte & 15U]};
    } else {
      result += c;
    }
  }
  return result + (length < text.size() ? "...\"" : "\"");
}

Mapping::~Mapping() {
  // munmap() takes a pointer to non-const and changes nothing that it points to.
  ::munmap(const_cast<std::byte*>(data_), size_);
}

InputFile::InputFile(std::string_view operation, const std::filesystem::path& path)
    : operation_(operation), path_(path) {
  // Without O_NONBLOCK, opening a named pipe would wait for somebody to write to it.
  descriptor_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    refuse("got \"" + text_of_errno(errno) + "\", expected a file that can be read");
  }
  struct stat status {};
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    refuse(known && S_ISDIR(status.st_mode)
               ? "got a folder, expected a regular file"
               : "got a pipe, device or socket, expected a regular file");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
}

InputFile::~InputFile() { ::close(descriptor_); }

void InputFile::refuse(std::string_view what, ErrorCode code) const {
  fail(code, operation_, path_.string(), what);
}

void InputFile::read_at(std::uint64_t offset, void* to, std::size_t num_bytes) const {
  auto* target = static_cast<std::byte*>(to);
  while (num_bytes > 0) {
    const ssize_t got =
        ::pread(descriptor_, target, std::min(num_bytes, kMaxTransfer), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      refuse("got \"" + text_of_errno(errno) + "\" at byte " + std::to_string(offset) +
             ", expected bytes");
    }
    if (got == 0) {
      refuse("got the end of the file at byte " + std::to_string(offset) + ", expected " +
             std::to_string(num_bytes) + " more bytes (was it shortened while it was read?)");
    }
    const auto count = static_cast<std::size_t>(got);
    target += count;
    offset += count;
    num_bytes -= count;
  }
}

Mapping InputFile::map() const {
  const auto length = static_cast<std::size_t>(size_);
  void* const data = ::mmap(nullptr, length, PROT_READ, MAP_PRIVATE, descriptor_, 0);
  if (data == MAP_FAILED) {
    refuse("got \"" + text_of_errno(errno) + "\", expected " + std::to_string(size_) +
           " bytes that can be mapped");
  }
  return {static_cast<const std::byte*>(data), length};
}

AtomicFile::AtomicFile(std::string_view operation, const std::filesystem::path& target)
    : operation_(operation), target_(target) {
  const OutputTarget resolved = resolve_output(operation, target);
  path_ = resolved.path;
  descriptor_ = resolved.stream;
  if (descriptor_ >= 0) return;
  struct stat status {};
  const bool exists = ::stat(path_.c_str(), &status) == 0;
  static std::atomic<unsigned> counter{0};
  remove_leftovers(path_);
  // The number of the process tells processes apart, the counter the threads of one. Names that a
  // crash has left, and that could not be removed, are passed over.
  for (int attempt = 0; descriptor_ < 0 && attempt < 100; ++attempt) {
    temporary_ = path_;
    temporary_ +=
        std::string(kTemporary) + std::to_string(::getpid()) + "-" + std::to_string(counter++);
    descriptor_ = ::open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (descriptor_ < 0 && errno != EEXIST) break;
  }
  if (descriptor_ < 0) refuse_errno("create a file next to it");
  static_cast<void>(::flock(descriptor_, LOCK_EX | LOCK_NB));  // for is_abandoned()
  if (exists) static_cast<void>(::fchmod(descriptor_, status.st_mode & 0777U));
}

AtomicFile::~AtomicFile() {
  if (descriptor_ >= 0) ::close(descriptor_);
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void AtomicFile::refuse_errno(std::string_view action) const {
  const int error = errno;
  fail(ErrorCode::kIo, operation_, target_.string(),
       "got \"" + text_of_errno(error) + "\", expected to " + std::string(action));
}

void AtomicFile::write(const void* data, std::size_t num_bytes) {
  const auto* from = static_cast<const std::byte*>(data);
  while (num_bytes > 0) {
    const ssize_t written = ::write(descriptor_, from, std::min(num_bytes, kMaxTransfer));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) refuse_errno("write " + std::to_string(num_bytes) + " bytes");
    from += written;
    num_bytes -= static_cast<std::size_t>(written);
  }
}

void AtomicFile::commit() {
  const bool is_stream = temporary_.empty();
  if (!is_stream && ::fsync(descriptor_) != 0) refuse_errno("bring it to the disk");
  // Closed before the rename: some file systems report a failed write only here.
  const int descriptor = descriptor_;
  descriptor_ = -1;
  if (::close(descriptor) != 0) refuse_errno("bring it to the disk");
  if (is_stream) return;
  const std::filesystem::path folder = path_.parent_path();  // after the rename nothing may fail
  if (::rename(temporary_.c_str(), path_.c_str()) != 0) refuse_errno("rename it into place");
  temporary_.clear();
  sync_folder(folder);
}

}  // namespace ladon::io
