// One block of slots for all sequences, [batch, capacity]. Forks share the block until both want to
// write the same slots.
#include <algorithm>
#include <bit>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cache/kinds.h"
#include "cache/kv_cache_impl.h"
#include "cache/shared_slots.h"
#include "core/fail.h"
#include "core/fork_safe_mutex.h"

namespace ladon {
namespace {

constexpr std::string_view kOperation = "KvCache::contiguous";
/// A growing cache starts with this many tokens: small compared with any model, and past the first
/// steps.
constexpr std::int64_t kFirstCapacity = 64;

struct SharedBlock {
  SharedBlock(const Context& context, const KvCacheOptions& options, std::int64_t tokens)
      : capacity(tokens),
        storage(KvStorage::make(context, options, options.batch, tokens)),
        slots(static_cast<std::size_t>(options.batch), SharedSlots{.owners = 1}) {}

  const std::int64_t capacity;  // of each sequence
  KvStorage storage;
  ForkSafeMutex mutex;
  std::vector<SharedSlots> slots;  // of each sequence; guarded by the mutex
};

class Contiguous final : public KvCache::Impl {
 public:
  Contiguous(const Context& context, const KvCacheOptions& options, std::int64_t capacity)
      : Impl(options),
        fixed_(capacity > 0),
        block_(std::make_shared<SharedBlock>(context, options, capacity)) {
    refresh();
  }

  Contiguous(const Contiguous& other) : Impl(other), fixed_(other.fixed_), block_(other.block_) {
    const std::lock_guard lock(block_->mutex);
    for (std::size_t b = 0; b < block_->slots.size(); ++b) {
      block_->slots[b].add_owner(lengths_[b]);
    }
  }

  ~Contiguous() override { leave(*block_); }

  std::string_view kind() const noexcept override { return "contiguous"; }
  std::unique_ptr<Impl> fork(const Context&) const override {
    return std::make_unique<Contiguous>(*this);
  }

  std::unique_ptr<Impl> reordered(const Context& context,
                                  std::span<const std::int64_t> from) const override {
    KvCacheOptions options = options_;
    options.batch = static_cast<std::int64_t>(from.size());
    auto other = std::make_unique<Contiguous>(context, options, block_->capacity);
    other->fixed_ = fixed_;
    for (std::size_t b = 0; b < from.size(); ++b) {
      const std::int64_t length = lengths_[index(from[b])];
      other->lengths_[b] = length;
      other->block_->slots[b].filled = length;
      other->block_->storage.copy_slots(context, block_->storage, from[b] * block_->capacity,
                                        static_cast<std::int64_t>(b) * block_->capacity, length);
    }
    other->refresh();
    return other;
  }

  std::unique_ptr<Impl> empty_at(const Context& context, std::span<const std::int64_t> first,
                                 std::span<const std::int64_t>) const override {
    if (std::any_of(first.begin(), first.end(), [](std::int64_t f) { return f != 0; })) {
      return nullptr;
    }
    auto other = std::make_unique<Contiguous>(context, options_, block_->capacity);
    other->fixed_ = fixed_;
    return other;
  }

  void reserve(const Context& context, std::int64_t length) override {
    if (length > block_->capacity && fixed_) refuse("KvCache::reserve", length);
    if (length <= block_->capacity && !is_shared()) return;
    replace_block(context, std::max(length, block_->capacity));
    keep_slots(context);
    refresh();
  }

  KvStorage& storage() noexcept override { return block_->storage; }
  std::int64_t slot_of(std::int64_t sequence, std::int64_t token) const noexcept override {
    return sequence * block_->capacity + token;
  }

 private:
  bool is_shared() const {
    const std::lock_guard lock(block_->mutex);
    return std::any_of(block_->slots.begin(), block_->slots.end(),
                       [](const SharedSlots& slots) { return slots.owners > 1; });
  }

  static void leave(SharedBlock& block) noexcept {
    const std::lock_guard lock(block.mutex);
    for (SharedSlots& slots : block.slots) --slots.owners;
  }

  [[noreturn]] void refuse(std::string_view operation, std::int64_t wanted) const {
    fail(operation, "length",
         "got a sequence of " + std::to_string(wanted) +
             " tokens, expected at most the cache's capacity of " +
             std::to_string(block_->capacity));
  }

  /// An unshared block of `capacity` tokens a sequence. The old one is kept until the append has
  /// ended.
  void replace_block(const Context& context, std::int64_t capacity) {
    auto block = std::make_shared<SharedBlock>(context, options_, capacity);
    for (std::int64_t b = 0; b < options_.batch; ++b) {
      const std::int64_t length = lengths_[index(b)];
      block->storage.copy_slots(context, block_->storage, b * block_->capacity, b * capacity,
                                length);
      block->slots[index(b)].filled = length;
    }
    replaced_ = std::exchange(block_, std::move(block));
  }

  /// False where a fork has written what we want to write; nothing is claimed then.
  bool claim(std::span<const std::int64_t> counts) noexcept {
    const std::lock_guard lock(block_->mutex);
    for (std::size_t b = 0; b < counts.size(); ++b) {
      if (counts[b] == 0 || block_->slots[b].claim(lengths_[b], lengths_[b] + counts[b])) continue;
      give_back(counts.first(b));
      return false;
    }
    return true;
  }

  void give_back(std::span<const std::int64_t> counts) noexcept {
    for (std::size_t b = 0; b < counts.size(); ++b) {
      if (counts[b] > 0) block_->slots[b].give_back(lengths_[b], lengths_[b] + counts[b]);
    }
  }

  void allocate_slots(const Context& context, std::string_view operation,
                      std::span<const std::int64_t> counts) override {
    std::int64_t longest = 0;
    for (std::size_t b = 0; b < counts.size(); ++b) {
      longest = std::max(longest, lengths_[b] + counts[b]);
    }
    if (longest > block_->capacity) {
      if (fixed_) refuse(operation, longest);
      replace_block(context, static_cast<std::int64_t>(std::bit_ceil(
                                 static_cast<std::uint64_t>(std::max(longest, kFirstCapacity)))));
    }
    if (claim(counts)) return;
    replace_block(context, block_->capacity);
    claim(counts);  // cannot fail: the block is ours alone
  }

  void keep_slots(const Context&) noexcept override {
    if (replaced_ == nullptr) return;
    leave(*replaced_);
    replaced_.reset();
  }

  void release_slots() noexcept override {
    if (replaced_ != nullptr) {
      block_ = std::move(replaced_);  // the new one was never visible to others
      return;
    }
    const std::lock_guard lock(block_->mutex);
    give_back(counts_);
  }

  void drop_tail(std::int64_t sequence) noexcept override {
    const std::lock_guard lock(block_->mutex);
    block_->slots[index(sequence)].drop_behind(lengths_[index(sequence)]);
  }

  KvSequenceView describe(std::int64_t sequence, std::int64_t length) const noexcept override {
    return {.length = length, .first_slot = sequence * block_->capacity};
  }

  bool fixed_;
  std::shared_ptr<SharedBlock> block_;
  std::shared_ptr<SharedBlock> replaced_;  // during an append that moved to another block
};

}  // namespace

std::unique_ptr<KvCache::Impl> make_contiguous(const Context& context,
                                               const KvCacheOptions& options,
                                               std::int64_t capacity) {
  if (capacity < 0) {
    fail(kOperation, "capacity", "got " + std::to_string(capacity) + ", expected 0 (grow) or more");
  }
  return std::make_unique<Contiguous>(context, checked_options(kOperation, options), capacity);
}

}  // namespace ladon
