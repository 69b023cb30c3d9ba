// Ctrl-C in a long call. Python's signal handlers, of which the default for SIGINT raises
// KeyboardInterrupt, run only while Python does; so long calls let them run between pieces of their
// work. What a handler raises ends the call.
#pragma once

namespace ladon::python {

/// For ContextOptions::check_interrupt.
void check_signals();

/// Whether this thread runs a handler in the middle of a call, which may hold locks.
bool in_signal_handler() noexcept;

}  // namespace ladon::python
