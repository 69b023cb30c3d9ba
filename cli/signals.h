// Ctrl-C and its relatives: one line, and no half-written file.
#pragma once

namespace ladon::cli {

/// From now on SIGINT, SIGTERM and SIGHUP end the program with a line on stderr, and by that
/// signal, so that shells and callers see what happened. A file that grows past a limit is an error
/// of write() and no longer a signal.
void install_signal_handlers();

/// While one lives, those signals wait: for the moments in which a file is being written. They act
/// when it goes.
class HeldSignals {
 public:
  HeldSignals() noexcept;
  ~HeldSignals();
  HeldSignals(const HeldSignals&) = delete;
  HeldSignals& operator=(const HeldSignals&) = delete;
};

}  // namespace ladon::cli
