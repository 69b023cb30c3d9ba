// Where an output file really is: behind symbolic links, or a stream that cannot be renamed over.
#pragma once

#include <filesystem>
#include <string_view>

namespace ladon::io {

/// The end of a chain of symbolic links from a caller's path.
struct OutputTarget {
  /// A regular file, existing or new: written next to it, and renamed.
  std::filesystem::path path{};
  /// Or the open descriptor of a pipe, a character device, or what /dev/fd names: written to
  /// directly, the caller's to close. -1 for files.
  int stream = -1;
};

/// Throws Error (kIo) where `target` is a folder, a block device, a socket, or cannot be opened.
/// Opening a named pipe waits for its reader.
OutputTarget resolve_output(std::string_view operation, const std::filesystem::path& target);

}  // namespace ladon::io
