// The kinds of caches. Options are checked here.
#pragma once

#include <memory>

#include "ladon/kv_cache.h"

namespace ladon {

std::unique_ptr<KvCache::Impl> make_contiguous(const Context& context,
                                               const KvCacheOptions& options,
                                               std::int64_t capacity);
std::unique_ptr<KvCache::Impl> make_window(const Context& context, const KvCacheOptions& options,
                                           std::int64_t window_left, std::int64_t spare);
std::unique_ptr<KvCache::Impl> make_paged(const std::shared_ptr<PagePool>& pool,
                                          std::int64_t batch);

}  // namespace ladon
