// ThreadPool: the threads that a Context owns.
#pragma once

#include <sys/types.h>

#include <memory>

#include "ladon/context.h"

namespace ladon {

/// Runs jobs from any number of callers at once. A caller works on its own job until nothing is
/// left of it, so that a job is done even if no thread could be started, if all of them are busy,
/// or if it was submitted from inside another job.
class ThreadPool final : public Executor {
 public:
  /// `num_threads` counts the caller: num_threads - 1 are started, at the first run() that has work
  /// for them.
  explicit ThreadPool(int num_threads);
  /// No run() may be under way.
  ~ThreadPool() override;
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int concurrency() const noexcept override { return num_threads_; }
  void run(int count, void (*body)(void* state, int index), void* state) override;

 private:
  class Shared;

  int num_threads_;
  // The process that owns the threads. fork() copies this object but not them, and may copy a mutex
  // that one of them held; a child therefore touches nothing of Shared.
  pid_t process_;
  std::unique_ptr<Shared> shared_;
};

}  // namespace ladon
