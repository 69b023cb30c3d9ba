// WorkerProcess: another program that answers lines with lines, and may fail in every way.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace ladon::bench {

/// Speaks with a child process over a socket that is its standard input and output; its standard
/// error goes nowhere. Nothing here throws for what the child does: once it has failed, it has been
/// ended, and failure() says why.
class WorkerProcess {
 public:
  /// Starts the program, which is looked for as a shell would.
  explicit WorkerProcess(const std::vector<std::string>& arguments);
  /// Closes the line, on which a good child ends, and ends one that does not.
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

  /// The child's next line, without its end; empty where it failed, or was silent for so long.
  std::optional<std::string> read_line(double seconds);
  /// Sends a line (without its end) and reads the answer.
  std::optional<std::string> ask(const std::string& line, double seconds);

  /// Ends the child, for a reason that the caller has seen.
  void fail(const std::string& why);
  bool failed() const { return !failure_.empty(); }
  const std::string& failure() const { return failure_; }
  int process() const { return child_; }

 private:
  /// How the child ended, once it has.
  std::string ending();
  void kill_and_wait();

  pid_t child_ = -1;
  int line_ = -1;
  bool waited_ = false;
  std::string received_;  // and not yet read as a line
  std::string failure_;
};

}  // namespace ladon::bench
