// HostCache: what a cache holds, for the reference to read.
#pragma once

#include <optional>

#include "ladon/context.h"
#include "ladon/kv_cache.h"

namespace ladon::bench {

/// The cache's own view where it is on the host; else a copy there, in f32 (f64 where it holds
/// that). The cache must outlive it, and stay as it is.
class HostCache {
 public:
  HostCache(const Context& context, const KvCache& cache);

  KvCacheView view() const { return copy_ ? copy_->view() : cache_.view(); }
  /// The copy, to be appended to; null where there is none.
  KvCache* copy() { return copy_ ? &*copy_ : nullptr; }

 private:
  const KvCache& cache_;
  std::optional<KvCache> copy_;
};

}  // namespace ladon::bench
