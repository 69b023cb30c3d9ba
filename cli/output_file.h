// Files that a command writes: whole, or not at all.
#pragma once

#include <filesystem>
#include <string_view>

namespace ladon::cli {

/// Throws Failure now, rather than after minutes of work, where `path` can be seen not to be
/// writable. `option` begins the message: "--plot".
void check_writable(std::string_view option, const std::filesystem::path& path);

/// Writes beside `path` and renames, so that a failure leaves an older file as it was and nothing
/// of the new one. Throws Failure.
void write_file(std::string_view option, const std::filesystem::path& path,
                std::string_view content);

}  // namespace ladon::cli
