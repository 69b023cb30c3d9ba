#include "signals.h"

#include <signal.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <string_view>

namespace ladon::cli {
namespace {

constexpr std::array<int, 3> kSignals{SIGINT, SIGTERM, SIGHUP};

// Lock-free atomics: what a handler may touch, whichever thread it runs on.
std::atomic<int> holders{0};
std::atomic<int> waiting{0};
static_assert(std::atomic<int>::is_always_lock_free);

void end_by(int number) {
  // What a progress line left on a terminal is wiped out first.
  constexpr std::string_view kWipe = "\r\033[K";
  constexpr std::string_view kLine = "ladon: interrupted\n";
  if (isatty(STDERR_FILENO) != 0) {
    [[maybe_unused]] const auto wiped = write(STDERR_FILENO, kWipe.data(), kWipe.size());
  }
  [[maybe_unused]] const auto written = write(STDERR_FILENO, kLine.data(), kLine.size());
  signal(number, SIG_DFL);
  raise(number);
}

void on_signal(int number) {
  if (holders.load() > 0) {
    waiting.store(number);
  } else {
    end_by(number);
  }
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  action.sa_flags = SA_RESTART;  // writes that are under way go on
  for (const int number : kSignals) {
    struct sigaction before {};
    // What a parent chose to ignore (nohup) stays ignored.
    if (sigaction(number, nullptr, &before) == 0 && before.sa_handler == SIG_IGN) continue;
    sigaction(number, &action, nullptr);
  }
  signal(SIGXFSZ, SIG_IGN);
}

HeldSignals::HeldSignals() noexcept { holders.fetch_add(1); }

HeldSignals::~HeldSignals() {
  if (holders.fetch_sub(1) != 1) return;
  if (const int number = waiting.exchange(0); number != 0) end_by(number);
}

}  // namespace ladon::cli
