// The pool that scratch memory comes from, kept by the Context between calls so that a steady state
// allocates nothing.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>

#include "core/device_memory.h"
#include "core/workspace.h"

namespace ladon {

/// Unused blocks of one device's memory. Thread-safe.
class WorkspacePool {
 public:
  explicit WorkspacePool(std::shared_ptr<DeviceMemory> memory);
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;

  using Allocation = WorkspaceAllocation;

  /// At least `size` bytes, aligned to 64; content unspecified. Throws Error (kOutOfMemory).
  Allocation take(std::size_t size);
  void give_back(Allocation allocation) noexcept;

  DeviceId device() const noexcept { return memory_->device(); }

 private:
  // A few blocks are enough for a few concurrent callers; the rest are freed, as are large ones, so
  // that one huge call does not pin its memory for the life of the Context.
  static constexpr std::size_t kMaxKept = 8;
  static constexpr std::size_t kMaxKeptBytes = std::size_t{32} << 20;

  /// In a forked child the lock may be held by a thread that is not there: the pool is left alone.
  bool is_usable() const noexcept;

  const int process_;  // that made the pool
  const std::shared_ptr<DeviceMemory> memory_;
  std::mutex mutex_;
  std::array<Allocation, kMaxKept> free_;  // the first num_free_ are held
  std::size_t num_free_ = 0;
};

}  // namespace ladon
