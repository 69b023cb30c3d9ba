#include "peers/worker_process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <string_view>
#include <system_error>
#include <thread>

namespace ladon::bench {
namespace {

using Clock = std::chrono::steady_clock;

// An answer is short; whatever is longer is none.
constexpr std::size_t kLongestLine = 64 << 10;
constexpr std::chrono::milliseconds kPatience{2000};  // with a child that is to end by itself

std::string message_of(int error) { return std::generic_category().message(error); }

int milliseconds_until(Clock::time_point limit) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
}

/// The child's own ends of everything. Returns the error, 0 for none.
int spawn(const std::vector<std::string>& arguments, int line, pid_t& child) {
  std::vector<std::string> copies = arguments;
  std::vector<char*> pointers;
  pointers.reserve(copies.size() + 1);
  for (std::string& argument : copies) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, line, STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, line, STDOUT_FILENO);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  // A separate process group: what the child starts ends with it, and Ctrl-C is ours alone (the
  // child ends when the line does).
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETPGROUP);
  posix_spawnattr_setpgroup(&attributes, 0);
  const int error =
      posix_spawnp(&child, pointers[0], &actions, &attributes, pointers.data(), environ);
  posix_spawnattr_destroy(&attributes);
  posix_spawn_file_actions_destroy(&actions);
  return error;
}

}  // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& arguments) {
  // A socket and no pipes: writing to a child that has died must not be a signal.
  std::array<int, 2> ends{};
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()) != 0) {
    failure_ = "no socket: " + message_of(errno);
    return;
  }
  line_ = ends[0];
  const int error = spawn(arguments, ends[1], child_);
  close(ends[1]);
  if (error == 0) return;
  child_ = -1;
  failure_ = "cannot start " + arguments.front() + ": " + message_of(error);
}

WorkerProcess::~WorkerProcess() {
  if (line_ >= 0) shutdown(line_, SHUT_RDWR);
  const Clock::time_point limit = Clock::now() + kPatience;
  while (child_ > 0 && !waited_ && Clock::now() < limit) {
    if (waitpid(child_, nullptr, WNOHANG) != 0) {
      waited_ = true;
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  kill_and_wait();
  if (line_ >= 0) close(line_);
}

std::optional<std::string> WorkerProcess::read_line(double seconds) {
  if (failed()) return {};
  const Clock::time_point limit = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                     std::chrono::duration<double>(seconds));
  for (;;) {
    if (const std::size_t end = received_.find('\n'); end != std::string::npos) {
      std::string line = received_.substr(0, end);
      received_.erase(0, end + 1);
      return line;
    }
    if (received_.size() > kLongestLine) {
      fail("its answer has no end");
      return {};
    }
    pollfd waiting{line_, POLLIN, 0};
    const int ready = poll(&waiting, 1, milliseconds_until(limit));
    if (ready == 0 && Clock::now() >= limit) {
      std::array<char, 64> text{};
      std::snprintf(text.data(), text.size(), "no answer within %g seconds", seconds);
      fail(text.data());
      return {};
    }
    if (ready <= 0) continue;
    std::array<char, 4096> buffer{};
    const ssize_t size = recv(line_, buffer.data(), buffer.size(), 0);
    if (size < 0 && errno == EINTR) continue;
    if (size <= 0) {
      fail(ending());
      return {};
    }
    received_.append(buffer.data(), static_cast<std::size_t>(size));
  }
}

std::optional<std::string> WorkerProcess::ask(const std::string& line, double seconds) {
  if (failed()) return {};
  const std::string whole = line + "\n";
  std::string_view rest = whole;
  while (!rest.empty()) {
    const ssize_t sent = send(line_, rest.data(), rest.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      fail(ending());
      return {};
    }
    rest.remove_prefix(static_cast<std::size_t>(sent));
  }
  return read_line(seconds);
}

void WorkerProcess::fail(const std::string& why) {
  if (failed()) return;
  failure_ = why;
  kill_and_wait();
}

std::string WorkerProcess::ending() {
  // It has closed its end; it may need a moment to be gone.
  const Clock::time_point limit = Clock::now() + kPatience;
  int status = 0;
  while (waitpid(child_, &status, WNOHANG) == 0) {
    if (Clock::now() >= limit) return "it closed its output";
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  waited_ = true;
  if (WIFSIGNALED(status)) return "it was ended by signal " + std::to_string(WTERMSIG(status));
  return "it ended with status " + std::to_string(WEXITSTATUS(status));
}

void WorkerProcess::kill_and_wait() {
  if (child_ <= 0) return;
  kill(-child_, SIGKILL);
  while (!waited_ && waitpid(child_, nullptr, 0) < 0 && errno == EINTR) {
  }
  waited_ = true;
  child_ = -1;
}

}  // namespace ladon::bench
