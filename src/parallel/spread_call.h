// One call over a SpreadKvCache: what it appends, and what it attends to.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "attention/validate.h"
#include "core/checks.h"
#include "ladon/spread_cache.h"
#include "parallel/collective_call.h"
#include "parallel/share.h"

namespace ladon {

/// Results over some keys: [1, queries, heads, value_dim] and [1, heads, queries].
struct SpreadPart {
  Tensor out;
  Tensor lse;
};

/// Merges parts in their order.
void merge_parts(const Context& context, std::span<const SpreadPart> parts, const TensorView& out,
                 const TensorView& lse, const ConstTensorView& sinks = {});

class SpreadCall {
 public:
  SpreadCall(const Context& context, SpreadKvCache& cache)
      : context_(context), cache_(cache), lengths_(cache.lengths_) {}

  /// What ranks must have in common.
  void describe(CallSignature& signature) const;
  /// The sequences' lengths before the call.
  std::span<const std::int64_t> past() const noexcept { return cache_.lengths_; }

  /// Checks what is appended, and writes this rank's tokens behind the last. Calls read them, but
  /// they become part of the cache with commit() alone: a rank without space for them refuses the
  /// call, and no cache changes.
  void append(const Operation& operation, const ConstTensorView& k, const ConstTensorView& v,
              std::span<const std::int64_t> new_lengths, CallSignature& signature);
  void commit() noexcept;

  /// After append(), where something is appended.
  void check_attention(const Operation& operation, const ConstTensorView& q,
                       const AttentionOptions& options, const TensorView& out,
                       const TensorView& lse, const SpreadAttentionOptions& spread,
                       CallSignature& signature);
  /// `lse` says what is wanted.
  void attend(CollectiveCall& call, const ConstTensorView& q, const AttentionOptions& options,
              bool reproducible, const TensorView& lse);
  /// Copies the results.
  void publish(const TensorView& out, const TensorView& lse) const;

  /// The same for a call that has been checked, without lse: the results of this rank's share of
  /// the heads alone. q has all heads.
  Tensor attend_own_heads(CollectiveCall& call, const ConstTensorView& q,
                          const AttentionOptions& options, bool reproducible);
  /// All keys of a sequence, [length, num_kv_heads * head_dim], gathered from all ranks.
  Tensor gather_keys(CollectiveCall& call, std::int64_t sequence, DType dtype) const;

 private:
  /// Consecutive queries of one sequence.
  struct Piece {
    std::int64_t sequence = 0;
    std::int64_t first = 0;
    std::int64_t length = 0;
  };
  using Part = SpreadPart;

  /// This rank's keys, with those that are appended.
  KvCacheView local_view() const {
    return appended_.has_value() ? appended_->view() : cache_.local_.view();
  }
  std::int64_t num_splits(const Piece& piece) const;
  /// The split that has all keys which the queries of a sequence may see, if it is one.
  std::optional<std::int64_t> only_split(std::int64_t sequence,
                                         const AttentionOptions& options) const;
  std::int64_t position_of(std::int64_t sequence, const AttentionOptions& options) const;
  /// Queries of a sequence: of q without offsets, and where they begin in a packed q.
  std::int64_t query_len_of(std::int64_t sequence) const;
  /// A piece's part of q, out or lse.
  template <class View>
  View rows_of(const View& all, int query_dim, const Piece& piece) const {
    const bool packed = !query_offsets_.empty();
    const std::int64_t batch = packed ? 0 : piece.sequence;
    const std::int64_t first =
        piece.first + (packed ? query_offsets_[static_cast<std::size_t>(piece.sequence)] : 0);
    return all.slice(0, batch, batch + 1).slice(query_dim, first, first + piece.length);
  }
  void write(const ConstTensorView& k, const ConstTensorView& v,
             std::span<const std::int64_t> counts);
  std::vector<std::vector<Piece>> batches(std::int64_t bytes_of_query) const;
  /// Calls take(pieces, their results of this rank's heads) until all queries are done.
  template <class Take>
  void attend_pieces(CollectiveCall& call, const ConstTensorView& q,
                     const AttentionOptions& options, bool reproducible, const Take& take);
  std::vector<Part> attend_splits(const ConstTensorView& q, const AttentionOptions& options,
                                  const Piece& piece) const;
  Part attend_split(const ConstTensorView& q, const AttentionOptions& options, const Piece& piece,
                    std::int64_t split) const;
  Part exchange(CollectiveCall& call, const std::vector<Piece>& pieces,
                const std::vector<std::vector<Part>>& parts, bool reproducible,
                const AttentionOptions& options);
  void gather_heads(CollectiveCall& call, const std::vector<Piece>& pieces, const Part& merged);
  void put_rows(const std::vector<Piece>& pieces, int query_dim, const ConstTensorView& rows,
                const TensorView& all) const;

  const Context& context_;
  SpreadKvCache& cache_;
  std::vector<std::int64_t> lengths_;  // with what is appended
  Tensor own_k_, own_v_;               // of this rank
  std::optional<KvAppend> appended_;
  AttentionSizes sizes_;
  std::span<const std::int64_t> query_offsets_;  // of a packed q
  DType dtype_ = DType::kF32;                    // of q
  Tensor out_, lse_;                             // all heads
};

}  // namespace ladon
