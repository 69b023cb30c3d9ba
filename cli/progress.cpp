#include "progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>

namespace ladon::cli {
namespace {

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Progress::Progress() : terminal_(isatty(STDERR_FILENO) != 0) {}

Progress::~Progress() { clear(); }

void Progress::clear() {
  if (terminal_) std::fputs("\r\033[K", stderr);
}

void Progress::show(const std::string& text, bool now) {
  if (!terminal_ || (!now && seconds() - last_ < 0.1)) return;
  last_ = seconds();
  std::fprintf(stderr, "\r\033[K%s ...", text.c_str());
  std::fflush(stderr);
}

}  // namespace ladon::cli
