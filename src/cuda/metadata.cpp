#include "cuda/metadata.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "core/fail.h"
#include "cuda/queue.h"

namespace ladon::cuda {
namespace {

// Lists that are remembered. A model's layers share two or three.
constexpr std::size_t kMostBlocks = 16;
constexpr std::size_t kSmallestBlock = 1024;  // bytes

}  // namespace

HeldList::~HeldList() { metadata_.release(*static_cast<Metadata::Block*>(block_)); }

Metadata::Metadata(std::shared_ptr<DeviceMemory> memory) noexcept : memory_(std::move(memory)) {}

Metadata::~Metadata() {
  for (const Block& block : blocks_) {
    if (block.data != nullptr) memory_->free(block.data, block.size);
  }
}

void Metadata::restart() noexcept {
  const std::lock_guard lock(mutex_);
  for (Block& block : blocks_) {
    block.is_known = false;
    block.last_use = 0;
  }
}

Metadata::Block* Metadata::find(std::span<const std::byte> list,
                                std::size_t num_pointers) noexcept {
  for (Block& block : blocks_) {
    if (!block.is_known || block.num_pointers != num_pointers) continue;
    if (std::ranges::equal(block.list, list)) return &block;
  }
  return nullptr;
}

Metadata::Block& Metadata::unused() {
  Block* oldest = nullptr;
  for (Block& block : blocks_) {
    if (block.holders != 0) continue;
    if (oldest == nullptr || block.last_use < oldest->last_use) oldest = &block;
  }
  if (oldest != nullptr && (!oldest->is_known || blocks_.size() >= kMostBlocks)) return *oldest;
  return blocks_.emplace_back();
}

HeldList Metadata::hold(Queue& queue, std::span<const std::byte> list,
                        std::span<const Pointer> pointers) {
  const std::lock_guard lock(mutex_);
  Block* block = find(list, pointers.size());
  if (block == nullptr) {
    block = &unused();
    block->is_known = false;
    if (block->size < list.size()) {
      const std::size_t size = std::max(kSmallestBlock, std::bit_ceil(list.size()));
      void* const data = memory_->allocate(size);
      if (data == nullptr) {
        fail(ErrorCode::kOutOfMemory, "Context", "metadata",
             "got " + std::to_string(size) + " bytes, expected " + size_that_fits(*memory_));
      }
      if (block->data != nullptr) memory_->free(block->data, block->size);
      block->data = static_cast<std::byte*>(data);
      block->size = size;
    }
    block->list.assign(list.begin(), list.end());
    block->num_pointers = pointers.size();
    std::vector<std::byte> sent = block->list;
    for (const Pointer& pointer : pointers) {
      const std::byte* const target = block->data + pointer.target;
      std::memcpy(sent.data() + pointer.at, &target, sizeof target);
    }
    queue.upload(block->data, sent.data(), sent.size());
    block->is_known = true;
  }
  block->last_use = ++uses_;
  ++block->holders;
  return HeldList(*this, block, block->data);
}

void Metadata::release(Block& block) noexcept {
  const std::lock_guard lock(mutex_);
  --block.holders;
}

}  // namespace ladon::cuda
