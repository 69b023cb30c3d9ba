// The `ladon` command: reads the command line, does it, and turns every failure into one line on
// stderr and an exit status.
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <system_error>

#include "command_line.h"
#include "commands.h"
#include "failure.h"
#include "signals.h"

namespace ladon::cli {
namespace {

/// One line, whatever a file's name or content put into the message.
void complain(std::string message) {
  for (char& letter : message) {
    if (std::iscntrl(static_cast<unsigned char>(letter)) != 0) letter = ' ';
  }
  std::fprintf(stderr, "ladon: %s\n", message.c_str());
}

/// Output that could not be written (a full disk behind a redirection) is a failure too.
void flush_output() {
  const bool earlier = std::ferror(stdout) != 0;
  errno = 0;
  if (std::fflush(stdout) != 0 || earlier) {
    const int error = errno != 0 ? errno : EIO;
    throw Failure("cannot write to standard output: " + std::generic_category().message(error));
  }
}

int run(int argc, const char* const* argv) {
  try {
    const int status = parse_command_line(argc, argv)();
    flush_output();
    return status;
  } catch (const UsageError& error) {
    complain(error.what());
    return kExitUsage;
  } catch (const std::bad_alloc&) {
    complain("out of memory");
  } catch (const std::exception& error) {
    complain(error.what());
  }
  return kExitFailed;
}

}  // namespace
}  // namespace ladon::cli

int main(int argc, char** argv) {
  ladon::cli::install_signal_handlers();
  return ladon::cli::run(argc, argv);
}
