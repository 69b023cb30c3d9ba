// Workers: the host threads of a Context, its own or the host program's.
#pragma once

#include <functional>
#include <memory>

#include "ladon/context.h"

namespace ladon {

class Workers {
 public:
  /// Throws Error for a number of threads, or an executor, that cannot be used.
  explicit Workers(const ContextOptions& options);

  /// The caller's included.
  int num_threads() const noexcept { return num_threads_; }
  Executor& executor() const noexcept { return *executor_; }
  /// May be empty.
  const std::function<void()>& check_interrupt() const noexcept { return check_interrupt_; }

 private:
  int num_threads_;
  std::unique_ptr<Executor> own_executor_;
  Executor* executor_;
  std::function<void()> check_interrupt_;
};

}  // namespace ladon
