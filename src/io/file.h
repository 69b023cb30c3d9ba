// Files as the readers and writers of src/io use them: read at an offset, mapped, or written next
// to their target and renamed. Every failure is Error (kIo) with the path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "core/fail.h"

namespace ladon::io {

/// Text out of a file, in_quotes for a message: shortened, and without control characters.
std::string in_quotes(std::string_view text);

/// Mapped bytes. Unmapped with the object.
class Mapping {
 public:
  Mapping(const std::byte* data, std::size_t size) noexcept : data_(data), size_(size) {}
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  const std::byte* data() const noexcept { return data_; }

 private:
  const std::byte* data_;
  std::size_t size_;
};

/// A regular file, open for reading.
class InputFile {
 public:
  /// `operation` begins the messages.
  InputFile(std::string_view operation, const std::filesystem::path& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::filesystem::path& path() const noexcept { return path_; }
  /// When it was opened.
  std::uint64_t size() const noexcept { return size_; }

  /// Throws when the file ends before. Thread-safe.
  void read_at(std::uint64_t offset, void* to, std::size_t num_bytes) const;
  /// The whole file, which must not be empty.
  Mapping map() const;

  /// Throws Error with "operation: path: what".
  [[noreturn]] void refuse(std::string_view what, ErrorCode code = ErrorCode::kIo) const;

 private:
  std::string operation_;
  std::filesystem::path path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
};

/// A file that appears under its name when commit() has returned, and not before. Symbolic links
/// are followed. A pipe, a character device or an open descriptor (/dev/fd/3) cannot be renamed
/// over: it gets the bytes as they are written.
class AtomicFile {
 public:
  AtomicFile(std::string_view operation, const std::filesystem::path& target);
  /// Removes what was written to a file, unless it was committed.
  ~AtomicFile();
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  void write(const void* data, std::size_t num_bytes);
  /// Brings the bytes to the disk and gives them the target's name.
  void commit();

 private:
  [[noreturn]] void refuse_errno(std::string_view action) const;

  std::string operation_;
  std::filesystem::path target_;     // as the caller calls it
  std::filesystem::path path_;       // links resolved; empty for a stream
  std::filesystem::path temporary_;  // empty for a stream, and once it was renamed
  int descriptor_ = -1;
};

}  // namespace ladon::io
