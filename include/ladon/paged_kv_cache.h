// PagePool: pages of keys and values that many caches take and give back. See KvCache::paged().
#pragma once

#include <cstdint>
#include <memory>

#include "ladon/export.h"
#include "ladon/kv_cache.h"

namespace ladon {

/// Thread-safe. Held by shared pointers: a pool lives as long as the last of its caches.
///
/// A page belongs to every sequence whose table names it, and is free when none does. Pages that
/// were published (KvCache::publish_prefix) can still be matched after that, until they are
/// evicted, least recently used first.
class LADON_API PagePool {
 public:
  /// `page_size` tokens to a page, any number from 1. All memory is allocated here, on the
  /// Context's device. options.batch is not read.
  PagePool(const Context& context, const KvCacheOptions& options, std::int64_t page_size,
           std::int64_t num_pages);
  ~PagePool();
  PagePool(const PagePool&) = delete;
  PagePool& operator=(const PagePool&) = delete;

  const KvCacheOptions& options() const noexcept;
  std::int64_t page_size() const noexcept;
  std::int64_t num_pages() const noexcept;
  DeviceId device() const noexcept;

  /// num_pages = free + kept + used.
  struct Statistics {
    std::int64_t num_pages = 0;
    std::int64_t free_pages = 0;
    std::int64_t kept_pages = 0;  // published and unowned: evictable pages that can be matched
    std::int64_t used_pages = 0;
    std::int64_t shared_pages = 0;  // used by more than one sequence
    std::int64_t published_pages = 0;
    std::int64_t page_bytes = 0;
    std::int64_t bytes = 0;
    std::int64_t prefix_lookups = 0;  // since the pool was made
    std::int64_t prefix_tokens_found = 0;
    std::int64_t evictions = 0;  // times that kept pages were evicted, with all behind them
  };
  Statistics statistics() const;
  /// Frees the kept pages.
  void forget_prefixes() noexcept;

  class Impl;
  /// For the library's own use.
  Impl& impl() noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

}  // namespace ladon
