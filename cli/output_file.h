// Files that a command writes: whole, or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace ladon::cli {

/// Throws Failure now, rather than after minutes of work, where `path` can be seen not to be
/// writable. `option` begins the message: "--plot".
void check_writable(std::string_view option, const std::filesystem::path& path);

/// Throws Failure where two options name the same file.
void check_different(std::string_view option, const std::filesystem::path& path,
                     std::string_view other_option, const std::filesystem::path& other);

/// A temporary file next to its target until commit() renames it. Hold HeldSignals while one
/// lives. What is not committed is removed, and an older file of that name is as it was. Symbolic
/// links are followed. A pipe, a device or an open descriptor is never replaced: it gets the
/// content in commit().
class OutputFile {
 public:
  /// Writes everything. Throws Failure; `option` begins the message.
  OutputFile(std::string_view option, const std::filesystem::path& path, std::string_view content);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  /// Throws Failure.
  void commit();

 private:
  std::string option_;
  std::filesystem::path path_;       // links resolved
  std::filesystem::path temporary_;  // empty for a stream, and once it was renamed
  std::string stream_content_;
};

}  // namespace ladon::cli
