// Scratch memory for one call, kept by the Context between calls so that a steady state allocates
// nothing.
#pragma once

#include <array>
#include <cstddef>
#include <mutex>

namespace ladon {

/// Memory blocks that are not in use. Thread-safe.
class WorkspacePool {
 public:
  WorkspacePool();
  ~WorkspacePool();
  WorkspacePool(const WorkspacePool&) = delete;
  WorkspacePool& operator=(const WorkspacePool&) = delete;

  struct Block {
    std::byte* data = nullptr;
    std::size_t size = 0;
  };

  /// A block of at least `size` bytes, aligned to 64; content unspecified. Throws Error
  /// (kOutOfMemory).
  Block take(std::size_t size);
  void give_back(Block block) noexcept;

 private:
  // A few blocks are enough for a few concurrent callers; the rest are freed, as are large ones, so
  // that one huge call does not pin its memory for the life of the Context.
  static constexpr std::size_t kMaxKept = 8;
  static constexpr std::size_t kMaxKeptBytes = std::size_t{32} << 20;

  /// In a forked child the lock may be held by a thread that is not there: the pool is left alone.
  bool is_usable() const noexcept;

  const int process_;  // that made the pool
  std::mutex mutex_;
  std::array<Block, kMaxKept> free_;  // the first num_free_ are held
  std::size_t num_free_ = 0;
};

/// Holds one block for the length of a call.
class Workspace {
 public:
  Workspace(WorkspacePool& pool, std::size_t size) : pool_(pool), block_(pool.take(size)) {}
  ~Workspace() { pool_.give_back(block_); }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  std::byte* data() const noexcept { return block_.data; }

 private:
  WorkspacePool& pool_;
  WorkspacePool::Block block_;
};

}  // namespace ladon
