// Metadata: small lists of the host's, such as lengths and page tables, in the device's memory.
// What the device has already is not sent again: all layers of a model read the same lists.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/device_memory.h"
#include "cuda/held_list.h"

namespace ladon::cuda {

class Queue;

/// Thread-safe.
class Metadata {
 public:
  explicit Metadata(std::shared_ptr<DeviceMemory> memory) noexcept;
  ~Metadata();
  Metadata(const Metadata&) = delete;
  Metadata& operator=(const Metadata&) = delete;

  struct Block;

  /// A pointer at byte `at` of a list, to byte `target` of it.
  struct Pointer {
    std::size_t at;
    std::size_t target;
  };

  /// Where the device has `list`, with its pointers set there. Sends it where the device has not.
  HeldList hold(Queue& queue, std::span<const std::byte> list,
                std::span<const Pointer> pointers = {});

  /// Forgets what the device has; memory is kept, and given out in the same order as before.
  /// Nothing is held.
  void restart() noexcept;

 private:
  friend class HeldList;

  Block* find(std::span<const std::byte> list, std::size_t num_pointers) noexcept;
  /// An unused one, or a new one.
  Block& unused();
  void release(Block& block) noexcept;

  const std::shared_ptr<DeviceMemory> memory_;
  std::mutex mutex_;
  std::list<Block> blocks_;  // addresses stay
  std::uint64_t uses_ = 0;
};

struct Metadata::Block {
  std::vector<std::byte> list;
  std::size_t num_pointers = 0;
  std::byte* data = nullptr;
  std::size_t size = 0;  // of the memory
  int holders = 0;
  bool is_known = false;
  std::uint64_t last_use = 0;
};

}  // namespace ladon::cuda
