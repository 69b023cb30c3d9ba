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

class SpreadCall {
 public:
  SpreadCall(const Context& context, SpreadKvCache& cache)
      : context_(context), cache_(cache), lengths_(cache.lengths_) {}

  /// What ranks must have in common.
  void describe(CallSignature& signature) const;

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
  void write(const ConstTensorView& k, const ConstTensorView& v,
             std::span<const std::int64_t> counts);
  std::vector<std::vector<Piece>> batches(std::int64_t query_len,
                                          std::int64_t bytes_of_query) const;
  std::vector<Part> attend_splits(const ConstTensorView& q, const AttentionOptions& options,
                                  const Piece& piece) const;
  Part attend_split(const ConstTensorView& q, const AttentionOptions& options, const Piece& piece,
                    std::int64_t split) const;
  void exchange(CollectiveCall& call, const std::vector<Piece>& pieces,
                const std::vector<std::vector<Part>>& parts, bool reproducible,
                const ConstTensorView& sinks);
  void gather_heads(CollectiveCall& call, const std::vector<Piece>& pieces, const Part& merged);

  const Context& context_;
  SpreadKvCache& cache_;
  std::vector<std::int64_t> lengths_;  // with what is appended
  Tensor own_k_, own_v_;               // of this rank
  std::optional<KvAppend> appended_;
  AttentionSizes sizes_;
  DType dtype_ = DType::kF32;  // of q
  Tensor out_, lse_;           // all heads
};

}  // namespace ladon
