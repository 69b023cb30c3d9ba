// The whole problem of a context-parallel call, and the pieces of it that a rank computes.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "attention/validate.h"
#include "core/attention_params.h"
#include "ladon/context_parallel.h"
#include "parallel/collective_call.h"
#include "parallel/share.h"

namespace ladon {

/// Consecutive queries of one sequence that a rank owns.
struct QueryPiece {
  std::int64_t sequence = 0;
  std::int64_t batch = 0;  // index in the first dimension of the tensors
  std::int64_t local = 0;  // the first one among the rank's tokens
  std::int64_t first = 0;  // and in its sequence
  std::int64_t length = 0;
};

/// The options of attention, in a signature.
void describe_attention(const AttentionOptions& options, CallSignature& signature);

/// The keys of a sequence of `length` that queries at positions [first, last] may see by causal and
/// window; empty ranges may have any begin.
TokenRange keys_seen(const AttentionOptions& options, std::int64_t first, std::int64_t last,
                     std::int64_t length);

class WholeAttention {
 public:
  /// Checks a rank's inputs against the options and the plan, as attention() does.
  WholeAttention(const Operation& operation, const Communicator& communicator,
                 const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
                 const AttentionOptions& options, const ContextPlan& plan);

  /// Everything that ranks must have in common.
  void describe(const Context& context, CallSignature& signature) const;

  const AttentionSizes& sizes() const noexcept { return sizes_; }
  const AttentionOptions& options() const noexcept { return options_; }
  std::int64_t ranks() const noexcept { return static_cast<std::int64_t>(plan_.keys.size()); }
  std::int64_t group() const noexcept { return sizes_.num_heads / sizes_.num_kv_heads; }
  /// Never kAuto.
  ContextScheme scheme() const noexcept { return scheme_; }
  /// 0: as many as fit.
  std::int64_t kv_heads_at_once() const noexcept { return plan_.kv_heads_at_once; }
  std::span<const TokenRange> queries_of(int rank) const {
    return plan_.queries[static_cast<std::size_t>(rank)];
  }
  std::span<const TokenRange> keys_of(int rank) const {
    return plan_.keys[static_cast<std::size_t>(rank)];
  }

  /// The pieces of some ranges of queries.
  std::vector<QueryPiece> pieces_of(std::span<const TokenRange> queries) const;
  /// The keys of one rank that some query of another may see by causal, window and lengths.
  std::vector<TokenRange> keys_between(int owner, int reader) const;
  /// The first `queries` queries of the whole see no key from here on, by causal, window and
  /// lengths.
  std::int64_t end_of_keys_seen(std::int64_t queries) const;
  /// A sequence's keys, in the key dimension of the whole.
  TokenRange keys_of_sequence(std::int64_t sequence) const;
  /// The options of attention over one piece, for some heads.
  AttentionOptions options_of(const QueryPiece& piece, const Range& heads) const;
  /// The options of attention over all queries, for some heads.
  AttentionOptions options_of(const Range& heads) const;
  WholeProblem whole_of(const QueryPiece& piece) const {
    return {query_len_of(piece.sequence), piece.first, group()};
  }

 private:
  std::vector<TokenRange> keys_read_by(std::span<const TokenRange> queries) const;
  /// Where the first query of a piece stands among the keys of its sequence.
  std::int64_t position_of(const QueryPiece& piece) const;
  void check_plan(const Operation& operation, int ranks) const;
  void choose_scheme(const Operation& operation, int ranks);
  std::int64_t query_len_of(std::int64_t sequence) const;

  const ConstTensorView& q_;
  const ConstTensorView& k_;
  const ConstTensorView& v_;
  const AttentionOptions& options_;
  const ContextPlan& plan_;
  AttentionSizes sizes_;
  ContextScheme scheme_ = ContextScheme::kAllGather;
};

}  // namespace ladon
