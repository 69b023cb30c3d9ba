// The inside of a PagePool: who owns each page, which are free, and which can still be matched.
#pragma once

#include <cstdint>
#include <mutex>
#include <span>
#include <vector>

#include "cache/kv_storage.h"
#include "cache/prefix_index.h"
#include "cache/shared_slots.h"
#include "core/fork_safe_mutex.h"
#include "ladon/paged_kv_cache.h"

namespace ladon {

class PagePool::Impl {
 public:
  Impl(const Context& context, const KvCacheOptions& options, std::int64_t page_size,
       std::int64_t num_pages);

  const KvCacheOptions& options() const noexcept { return options_; }
  std::int64_t page_size() const noexcept { return page_size_; }
  std::int64_t num_pages() const noexcept { return static_cast<std::int64_t>(pages_.size()); }
  std::int64_t page_bytes() const noexcept;
  KvStorage& storage() noexcept { return storage_; }
  DeviceId device() const noexcept { return storage_.k.device(); }
  Statistics statistics() const;

  /// Hold this over every call below.
  std::unique_lock<ForkSafeMutex> lock() const { return std::unique_lock(mutex_); }

  /// Pages that take() can give: free ones, and kept ones that it would evict.
  std::int64_t available() const noexcept {
    return static_cast<std::int64_t>(free_.size()) + num_kept_;
  }
  /// A page for one owner, whose first `filled` slots are claimed. There must be one available.
  std::int32_t take(std::int64_t filled) noexcept;
  /// For an owner that holds `used` slots of it.
  void add_owner(std::int32_t page, std::int64_t used) noexcept;
  void release(std::int32_t page) noexcept;
  /// As SharedSlots's; published pages are never written again.
  bool claim(std::int32_t page, std::int64_t begin, std::int64_t end) noexcept;
  void give_back(std::int32_t page, std::int64_t begin, std::int64_t end) noexcept;
  void drop_behind(std::int32_t page, std::int64_t end) noexcept;

  /// Enters the full pages of a sequence that holds these tokens.
  void publish(std::span<const std::int32_t> table, std::span<const std::int64_t> tokens) noexcept;
  /// Appends to `table`, which has the capacity, the longest run of pages that hold these tokens.
  void adopt(std::span<const std::int64_t> tokens, std::vector<std::int32_t>& table) noexcept;
  void forget_kept() noexcept;

 private:
  static constexpr std::int32_t kNone = PrefixIndex::kNone;

  struct Page {
    SharedSlots slots;
    // The list of kept pages; the first was left the longest ago.
    std::int32_t previous_kept = kNone;
    std::int32_t next_kept = kNone;
  };

  Page& page(std::int32_t number) noexcept { return pages_[static_cast<std::size_t>(number)]; }
  void push_kept(std::int32_t number) noexcept;
  void unlink_kept(std::int32_t number) noexcept;
  void forget(std::int32_t number) noexcept;

  const KvCacheOptions options_;
  const std::int64_t page_size_;
  KvStorage storage_;
  mutable ForkSafeMutex mutex_;
  std::vector<Page> pages_;
  std::vector<std::int32_t> free_;
  PrefixIndex index_;
  std::int32_t first_kept_ = kNone;
  std::int32_t last_kept_ = kNone;
  std::int64_t num_kept_ = 0;
  std::int64_t lookups_ = 0;
  std::int64_t tokens_found_ = 0;
  std::int64_t evictions_ = 0;
};

}  // namespace ladon
