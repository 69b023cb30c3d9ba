// The inside of a Context.
#pragma once

#include <memory>

#include "core/workspace.h"
#include "ladon/context.h"

namespace ladon {

namespace cpu {
struct KernelTable;
}

class Context::Impl {
 public:
  explicit Impl(const ContextOptions& options);
  ~Impl();

  Executor& executor() noexcept { return *executor_; }
  int num_threads() const noexcept { return num_threads_; }
  Isa isa() const noexcept { return isa_; }
  /// Null for Isa::kReference.
  const cpu::KernelTable* kernels() const noexcept { return kernels_; }
  WorkspacePool& workspaces() noexcept { return workspaces_; }

 private:
  std::unique_ptr<Executor> own_executor_;
  Executor* executor_ = nullptr;
  int num_threads_ = 1;
  Isa isa_ = Isa::kReference;
  const cpu::KernelTable* kernels_ = nullptr;
  WorkspacePool workspaces_;
};

}  // namespace ladon
