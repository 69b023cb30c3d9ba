// CacheLoader: any bytes into caches of every kind, for the fuzzer and for the test of mutations.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <utility>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/error.h"
#include "support/host_context.h"

namespace ladon::test {

class CacheLoader {
 public:
  struct Outcome {
    int read = 0;
    int refused = 0;
  };

  CacheLoader() {
    for (const DType dtype : {DType::kF32, DType::kI8, DType::kF8E4M3}) {
      const KvCacheOptions options{
          .batch = 2, .num_kv_heads = 1, .head_dim = 2, .value_dim = 1, .format = dtype};
      pools_.push_back(std::make_shared<PagePool>(host_context(), options, 3, 12));
      caches_.push_back(KvCache::contiguous(host_context(), options));
      caches_.push_back(KvCache::window(host_context(), options, 3, 1));
      caches_.push_back(KvCache::paged(pools_.back(), 2));
    }
  }

  const std::vector<KvCache>& caches() const { return caches_; }

  /// Loads the file, of so many bytes, into each of them: it is read or refused with Error, and
  /// what was refused has changed nothing. Anything else aborts.
  Outcome load(const std::filesystem::path& path, std::size_t size) {
    Outcome outcome;
    for (KvCache& cache : caches_) {
      const CacheState before = state_of(cache);
      try {
        cache.load(host_context(), path);
        ++outcome.read;
        if (state_of(cache).bytes_used > static_cast<std::int64_t>(size)) std::abort();
      } catch (const Error& error) {
        // kInvalidArgument would blame the caller; kOutOfMemory is a pool that is too small.
        if (error.code() == ErrorCode::kInvalidArgument) std::abort();
        ++outcome.refused;
        // NaN is not equal to itself: files may hold it, so the lengths must do.
        const CacheState after = state_of(cache);
        if (after.lengths != before.lengths || after.held != before.held) std::abort();
      }
    }
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      const KvCache& paged = caches_[3 * i + 2];
      const std::int64_t pages = (paged.length(0) + 2) / 3 + (paged.length(1) + 2) / 3;
      if (pools_[i]->statistics().used_pages != pages) std::abort();
    }
    return outcome;
  }

 private:
  std::vector<std::shared_ptr<PagePool>> pools_;
  std::vector<KvCache> caches_;
};

}  // namespace ladon::test
