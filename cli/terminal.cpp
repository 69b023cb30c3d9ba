#include "terminal.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <charconv>
#include <cstdlib>
#include <string_view>

namespace ladon::cli {
namespace {

/// Null where it is not set.
const char* environment(const char* name) {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): only setenv() races with it
  return std::getenv(name);
}

}  // namespace

std::optional<int> terminal_width() {
  if (const char* const given = environment("COLUMNS")) {
    const std::string_view text = given;
    int columns = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), columns);
    if (error == std::errc() && end == text.data() + text.size() && columns > 0) return columns;
  }
  winsize size{};
  if (isatty(STDOUT_FILENO) == 0 || ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) != 0) return {};
  if (size.ws_col == 0) return {};
  return size.ws_col;
}

bool shows_colours() {
  // no-color.org: set and not empty.
  const char* const refused = environment("NO_COLOR");
  if (refused != nullptr && *refused != '\0') return false;
  const char* const kind = environment("TERM");
  return isatty(STDOUT_FILENO) != 0 && kind != nullptr && std::string_view(kind) != "dumb";
}

}  // namespace ladon::cli
