// "-" as the name of a file: standard input and standard output. Pipes as inputs.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

namespace ladon::cli {

/// "-", or a name of the descriptor such as /dev/stdout.
bool is_standard_output(std::string_view path);

/// Where one of these files is standard output, it gets it alone: printed text goes to standard
/// error from then on. Throws UsageError where two files, or a file and --json, would share it.
void claim_standard_output(std::string_view command, std::initializer_list<std::string_view> paths,
                           bool json);

/// The path that a file of an option is opened by.
std::string output_path(const std::string& path);

/// As messages call it.
std::string shown_output(const std::string& path);

/// The path of a regular file with the same content: `path` itself, or what comes through a pipe
/// or standard input ("-"), collected in memory. Throws Failure; `option` begins the message.
std::string input_path(std::string_view option, const std::string& path);

/// A message about such a file, with the name that the user gave.
std::string with_name(std::string message, const std::string& opened, const std::string& name);

}  // namespace ladon::cli
