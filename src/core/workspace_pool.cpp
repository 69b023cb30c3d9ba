#include "core/workspace_pool.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "core/fail.h"

namespace ladon {

WorkspacePool::WorkspacePool(std::shared_ptr<DeviceMemory> memory)
    : process_(getpid()), memory_(std::move(memory)) {}

bool WorkspacePool::is_usable() const noexcept { return process_ == getpid(); }

WorkspacePool::~WorkspacePool() {
  for (std::size_t i = 0; i < num_free_; ++i) memory_->free(free_[i].data, free_[i].size);
}

WorkspacePool::Allocation WorkspacePool::take(std::size_t size) {
  if (size == 0) return {};
  if (is_usable()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    // The smallest that fits, so that a small call does not hold the block a large one wants.
    std::size_t best = num_free_;
    for (std::size_t i = 0; i < num_free_; ++i) {
      if (free_[i].size < size) continue;
      if (best == num_free_ || free_[i].size < free_[best].size) best = i;
    }
    if (best != num_free_) {
      const Allocation block = free_[best];
      free_[best] = free_[--num_free_];
      return block;
    }
  }
  // A power of two, because sequences grow token by token: a block of the exact size would be too
  // small for the next call already. Blocks too large to keep gain nothing by it.
  const std::size_t capacity = size <= kMaxKeptBytes ? std::bit_ceil(size) : size;
  void* const data = memory_->allocate(capacity);
  if (data == nullptr) {
    fail(ErrorCode::kOutOfMemory, "workspace", "size",
         "got " + std::to_string(capacity) + " bytes of scratch, expected " +
             size_that_fits(*memory_));
  }
  return {static_cast<std::byte*>(data), capacity};
}

void WorkspacePool::give_back(Allocation block) noexcept {
  if (block.data == nullptr) return;
  if (block.size <= kMaxKeptBytes && is_usable()) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (num_free_ < kMaxKept) {
      free_[num_free_++] = block;
      return;
    }
    // Full: keep the larger blocks, which serve every call that the smaller ones do.
    const auto smallest =
        std::min_element(free_.begin(), free_.end(),
                         [](const Allocation& a, const Allocation& b) { return a.size < b.size; });
    if (smallest->size < block.size) std::swap(*smallest, block);
  }
  memory_->free(block.data, block.size);
}

Workspace::Workspace(WorkspacePool& pool, std::size_t size)
    : pool_(pool), block_(pool.take(size)) {}

Workspace::~Workspace() { pool_.give_back(block_); }

}  // namespace ladon
