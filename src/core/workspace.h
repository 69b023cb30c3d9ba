// Scratch memory for one call, from the pool of a Context (core/workspace_pool.h). Without the
// pool's own includes, because every CUDA kernel's unit includes this.
#pragma once

#include <cstddef>

namespace ladon {

class WorkspacePool;

struct WorkspaceAllocation {
  std::byte* data = nullptr;
  std::size_t size = 0;
};

/// Holds one allocation for the length of a call.
class Workspace {
 public:
  /// At least `size` bytes, aligned to 64; content unspecified. Throws Error (kOutOfMemory).
  Workspace(WorkspacePool& pool, std::size_t size);
  ~Workspace();
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const noexcept { return block_.data; }

 private:
  WorkspacePool& pool_;
  WorkspaceAllocation block_;
};

}  // namespace ladon
