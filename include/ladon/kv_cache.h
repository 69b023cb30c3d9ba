// KvCache: keys and values of past tokens, as an object that does its own bookkeeping.
//
//   KvCache::contiguous  one block for each sequence; grows by doubling, or has a fixed capacity
//   KvCache::window      a ring that holds just a sliding window, for runs of any length
//   KvCache::paged       pages of a shared PagePool (paged_kv_cache.h); forks share their pages
//
// Attention reads a cache through its KvCacheView alone. A cache's memory is on the device of the
// Context that it was made with; calls that touch it take a Context of that device. A call that
// throws leaves cache and pool as they were. A const cache may be read, forked and saved by many
// threads at once; forks of one cache may be used by different threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "ladon/context.h"
#include "ladon/export.h"
#include "ladon/kv_cache_view.h"
#include "ladon/kv_format.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

class PagePool;
struct AppendSteps;

/// What a cache holds for each token.
struct KvCacheOptions {
  std::int64_t batch = 1;  // sequences
  std::int64_t num_kv_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;  // 0: head_dim
  /// Values are the first value_dim elements of the keys, and are not stored again: what a latent
  /// (MLA) layer needs. Appends then take keys alone.
  bool values_in_keys = false;
  /// The model's query heads, and the elements of a key and a value together that each would have
  /// in multi-head attention. Read by the mha_...() accounts alone. 0: num_kv_heads, and head_dim +
  /// value_dim.
  std::int64_t num_heads = 0;
  std::int64_t mha_dim = 0;
  /// f64, f32, f16, bf16, or int8 or fp8 (f8e4m3) with an f32 scale per token and head
  /// (docs/numerics.md says what that costs).
  KvFormat format{};
};

class LADON_API KvCache {
 public:
  /// With a capacity, that many tokens for each sequence and no more; without (0), it grows.
  static KvCache contiguous(const Context& context, const KvCacheOptions& options,
                            std::int64_t capacity = 0);
  /// Keeps the last window_left + 1 keys plus `spare` older ones, so that truncate() can roll back
  /// up to `spare` tokens. Attention over it must use a window_left no wider.
  static KvCache window(const Context& context, const KvCacheOptions& options,
                        std::int64_t window_left, std::int64_t spare = 0);
  /// Takes its pages from a pool as it grows, and gives them back. It is where the pool is.
  static KvCache paged(const std::shared_ptr<PagePool>& pool, std::int64_t batch = 1);

  ~KvCache();
  /// A cache that has been moved from can only be assigned to or destroyed.
  KvCache(KvCache&& other) noexcept;
  KvCache& operator=(KvCache&& other) noexcept;

  /// "contiguous", "window" or "paged".
  std::string_view kind() const noexcept;
  /// With every default filled in; batch as it is now.
  const KvCacheOptions& options() const noexcept;
  std::int64_t batch() const noexcept { return options().batch; }
  DeviceId device() const noexcept;

  /// Tokens that the sequence has seen: the position of its next one.
  std::int64_t length(std::int64_t sequence = 0) const;
  /// Keys of it that can be read: all of them, but for a window.
  std::int64_t held(std::int64_t sequence = 0) const;
  /// The window of a window cache; the largest number otherwise.
  std::int64_t window_left() const noexcept;

  /// Appends k [batch, new_len, num_kv_heads, head_dim] and v [batch, new_len, num_kv_heads,
  /// value_dim], of any float dtype and any strides but for the last. With `new_lengths` (size
  /// batch), the first new_lengths[b] tokens of sequence b alone; or k and v are packed, [1, sum of
  /// new_lengths, ...]. All or nothing. KvAppend does the same in two steps.
  void append(const Context& context, const ConstTensorView& k, const ConstTensorView& v,
              std::span<const std::int64_t> new_lengths = {});

  /// Forgets the tokens of a sequence from `length` on (rejected drafts). A window cache can go
  /// back as long as it holds all that the window then shows.
  void truncate(std::int64_t sequence, std::int64_t length);
  /// Forgets a sequence, or everything. A contiguous cache keeps its memory, pages go back.
  void reset(std::int64_t sequence);
  void reset();
  /// Sequence b becomes what sequence from[b] was (beam search); the batch becomes from.size().
  /// Pages are shared; other caches copy.
  void reorder(const Context& context, std::span<const std::int64_t> from);
  /// Allocates beforehand, so that appending up to this length allocates nothing: a contiguous
  /// cache gets a block that it does not share. Pages of a pool are still taken when they are
  /// needed, and a chunk of several tokens into a window makes a copy of it for the time of the
  /// call.
  void reserve(const Context& context, std::int64_t length);

  /// An independent cache with the same content. Contiguous and paged caches are copy-on-write:
  /// shared memory is copied when a second owner appends past the fork point (a paged cache then
  /// copies one page), or goes back behind it and on from there; where just one goes on, nothing is
  /// copied. Windows copy what they hold.
  KvCache fork(const Context& context) const;

  /// Writes a file, whole or not at all. src/cache/cache_file.h describes its format.
  void save(const Context& context, const std::filesystem::path& path) const;
  /// Becomes what was saved, from a cache of any kind with the same options. A window's file fits
  /// only window caches that need no more of the past than it has. A paged cache needs new pages
  /// before it gives its old ones back. Throws Error (kIo) for a file that cannot be trusted.
  void load(const Context& context, const std::filesystem::path& path);

  /// Paged caches, prefix sharing between unrelated requests. Says which tokens the sequence holds,
  /// so that others may find its full pages by them; needs no more token ids than its length.
  void publish_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids);
  /// Gives an empty sequence the longest run of published pages that hold these tokens; returns
  /// how many tokens it now has, a multiple of the page size.
  std::int64_t adopt_prefix(std::int64_t sequence, std::span<const std::int64_t> token_ids);

  /// What a sequence holds, oldest first: [held, num_kv_heads, head_dim] and [held, num_kv_heads,
  /// value_dim], on the cache's device, in the stored dtype (f32 for int8 and fp8) or another float
  /// dtype.
  Tensor keys(const Context& context, std::int64_t sequence = 0,
              std::optional<DType> dtype = {}) const;
  Tensor values(const Context& context, std::int64_t sequence = 0,
                std::optional<DType> dtype = {}) const;

  /// For attention(); valid until the cache changes.
  KvCacheView view() const;

  /// Elements that are held for all tokens, and their bytes, scales included.
  std::int64_t elements_used() const noexcept;
  std::int64_t bytes_used() const noexcept;
  /// Bytes that the cache keeps from others: its blocks, or its pages. Shared memory counts for
  /// each that holds it.
  std::int64_t bytes_reserved() const noexcept;
  /// What multi-head attention, with as many KV heads as query heads, would hold for the same
  /// tokens in the same format with nothing dropped.
  std::int64_t mha_elements() const noexcept;
  std::int64_t mha_bytes() const noexcept;
  /// 1 - bytes_used / mha_bytes; 0 when empty.
  double reduction() const noexcept;

  class Impl;
  /// For the library's own use.
  explicit KvCache(std::unique_ptr<Impl> impl) noexcept;
  Impl& impl() noexcept { return *impl_; }
  const Impl& impl() const noexcept { return *impl_; }

 private:
  std::unique_ptr<Impl> impl_;
};

/// An append in two steps: when it is made the tokens are written and attention can read them
/// through view(); with commit() they become part of the cache. Without it the cache is as it was
/// (published pages that had no owner, and were evicted for it, stay forgotten).
/// Context and cache must outlive it; the cache must not be assigned to, and refuses other changes
/// meanwhile.
class LADON_API KvAppend {
 public:
  KvAppend(const Context& context, KvCache& cache, const ConstTensorView& k,
           const ConstTensorView& v, std::span<const std::int64_t> new_lengths = {});
  /// For the library's own use: k is rotated first.
  KvAppend(const Context& context, KvCache& cache, const ConstTensorView& k,
           const ConstTensorView& v, std::span<const std::int64_t> new_lengths,
           const AppendSteps& steps);
  ~KvAppend();
  KvAppend(const KvAppend&) = delete;
  KvAppend& operator=(const KvAppend&) = delete;

  /// The cache with the new tokens.
  KvCacheView view() const noexcept;
  /// Cannot fail.
  void commit() noexcept;

 private:
  const Context& context_;
  KvCache::Impl& impl_;
  bool committed_ = false;
};

}  // namespace ladon
