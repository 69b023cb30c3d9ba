// SpreadKvCache: a KV cache whose keys are spread over the ranks of a communicator, for sequences
// that are longer than one rank's memory, and attention over it.
//
// Keys are dealt out in splits of 512: the first 512 keys of a sequence are on rank 0, the next 512
// on rank 1, and so on round, so that sequences can grow and ranks stay balanced. Every rank
// attends with all queries over its own keys; ranks then exchange partial results, whose size does
// not depend on the length of the sequence, and merge them.
//
// Queries, new keys and values, options and outputs are whole on every rank, and must be the same
// on all of them. Calls are collective (ladon/communicator.h), but for truncate() and reset(),
// which all ranks must make all the same.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "ladon/communicator.h"
#include "ladon/export.h"
#include "ladon/kv_cache.h"

namespace ladon {

class LADON_API SpreadKvCache {
 public:
  /// Keys that are on one rank together.
  static constexpr std::int64_t kSplitKeys = 512;

  /// `local` holds this rank's keys: empty, of the same options on all ranks, contiguous or paged
  /// (with pages that 512 is a multiple of). The communicator must outlive the cache.
  SpreadKvCache(Communicator& communicator, KvCache local);

  Communicator& communicator() const noexcept { return communicator_; }
  const KvCacheOptions& options() const noexcept { return local_.options(); }
  std::int64_t batch() const noexcept { return local_.batch(); }
  /// Of all ranks' keys.
  std::int64_t length(std::int64_t sequence = 0) const;
  /// This rank's keys.
  const KvCache& local() const noexcept { return local_; }
  /// How many of a sequence's first `length` keys a rank has.
  static std::int64_t keys_of(int rank, int ranks, std::int64_t length) noexcept;

  /// As KvCache::append(), with the same arguments on every rank, each of which stores its own
  /// tokens. All or nothing, on all ranks.
  void append(const Context& context, const ConstTensorView& k, const ConstTensorView& v,
              std::span<const std::int64_t> new_lengths = {});
  /// As KvCache::truncate() and reset().
  void truncate(std::int64_t sequence, std::int64_t length);
  void reset();

 private:
  friend class SpreadCall;

  Communicator& communicator_;
  KvCache local_;
  std::vector<std::int64_t> lengths_;
};

struct SpreadAttentionOptions {
  /// Exchanges the partial results of every split, and not one of each rank: the same bits for any
  /// number of ranks, and, for decoding on CPUs (all rows of a KV head fit one tile), those of
  /// attention() over a KvCache in one process. Without it the bits are the same in every run with
  /// as many ranks.
  bool reproducible = false;
};

/// attention() over a cache (ladon/kv_cache_view.h): q [batch, query_len, num_heads, head_dim], the
/// newest tokens of the cache; out and, where it is wanted, lse. Every option of attention() over a
/// cache works.
LADON_API void spread_attention(const Context& context, const SpreadKvCache& cache,
                                const ConstTensorView& q, const AttentionOptions& options,
                                const TensorView& out, const TensorView& lse = {},
                                const SpreadAttentionOptions& spread = {});

/// append() and spread_attention() as one call: where it throws, no rank's cache has changed.
LADON_API void append_and_attend(const Context& context, SpreadKvCache& cache,
                                 const ConstTensorView& q, const ConstTensorView& k,
                                 const ConstTensorView& v, const AttentionOptions& options,
                                 const TensorView& out, const TensorView& lse = {},
                                 const SpreadAttentionOptions& spread = {});

}  // namespace ladon
