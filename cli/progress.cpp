#include "progress.h"

#include <unistd.h>

#include <chrono>
#include <cstdio>

#include "units.h"

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

RemainingTime::RemainingTime(int steps, double expected_seconds)
    : steps_(steps), expected_(expected_seconds), start_(seconds()) {}

std::string RemainingTime::begin(const std::string& name) {
  const int done = begun_++;
  // The first steps say little: what was expected counts as five of them.
  const double each = (seconds() - start_ + 5 * expected_ / steps_) / (done + 5);
  return std::to_string(begun_) + " of " + std::to_string(steps_) + ", about " +
         format_duration(each * (steps_ - done)) + " left: " + name;
}

TimeLeft::TimeLeft() : start_(seconds()) {}

std::string TimeLeft::after(double share) const { return text(seconds() - start_, share); }

void Steps::begin(const std::string& name) {
  progress_.show(name + left_.after(static_cast<double>(begun_++) / count_));
}

std::string TimeLeft::text(double elapsed_seconds, double share) {
  if (elapsed_seconds < 1 || share <= 0) return "";
  return ", about " + format_duration(elapsed_seconds / share * (1 - share)) + " left";
}

}  // namespace ladon::cli
