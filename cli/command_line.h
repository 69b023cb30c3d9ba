// The command line: subcommands, options, help. The one place that knows CLI11.
#pragma once

#include <functional>

namespace ladon::cli {

/// The command of the arguments, ready to run; it returns the exit status. Help and the version
/// are work too. Throws UsageError.
std::function<int()> parse_command_line(int argc, const char* const* argv);

}  // namespace ladon::cli
