// The new tokens of a call with a cache, as one list of rows whatever the sequences' lengths: so
// projections waste nothing on padding. Lists and rows are in workspaces of the Context, so that
// decoding allocates nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "core/arena.h"
#include "core/checks.h"
#include "ladon/attention_layer.h"

namespace ladon {

struct CachedTokens {
  std::int64_t batch = 0;
  std::int64_t seq = 0;                // of each sequence, where all have the same
  std::int64_t total = 0;              // of all sequences
  bool packed = false;                 // x has the tokens of all sequences one after the other
  std::span<const std::int64_t> past;  // tokens that each sequence has so far
  std::span<const std::int64_t> lengths;
  std::span<const std::int64_t> query_positions;  // CachedCall's

  std::int64_t count(std::int64_t sequence) const {
    return lengths.empty() ? seq : lengths[static_cast<std::size_t>(sequence)];
  }
  /// Tokens of a sequence with the new ones.
  std::int64_t length(std::int64_t sequence) const {
    return past[static_cast<std::size_t>(sequence)] + count(sequence);
  }
  /// x has rows that are padding.
  bool padded() const { return !packed && total != batch * seq; }
};

/// Checks x, out and the cache against the layer and each other. The result refers to the cache's
/// lengths: it is valid until the new tokens are part of the cache. `spread` are the lengths of a
/// cache of which `cache` is a part.
CachedTokens check_cached_call(const Operation& operation, const AttentionLayer& layer,
                               const ConstTensorView& x, const KvCache& cache,
                               const CachedCall& call, const TensorView& out,
                               std::span<const std::int64_t> spread = {});

/// What describes the rows of a call. Host memory.
struct RowLists {
  RowLists(Arena& arena, const CachedTokens& tokens);
  void fill(const CachedTokens& tokens);

  std::span<std::int64_t> positions;        // of each row
  std::span<std::int64_t> query_positions;  // of each row's query
  std::span<std::int64_t> offsets;          // first row of each sequence, and the number of rows
  std::span<std::int64_t> counts;           // rows of each sequence
};

/// x as rows: in place where its sequences follow each other, else copied.
class InputTokens {
 public:
  InputTokens(Arena& arena, const CachedTokens& tokens, const ConstTensorView& x);

  /// x as [total, width].
  ConstTensorView rows(const Context& context, const CachedTokens& tokens,
                       const RowLists& lists) const;

 private:
  ConstTensorView x_;
  bool staged_;
  TensorView rows_;
};

/// x, the queries and out as rows: in place where their sequences follow each other, else copied.
class TokenRows {
 public:
  TokenRows(Arena& arena, const CachedTokens& tokens, const ConstTensorView& x,
            const CachedCall& call, const TensorView& out);

  /// What is appended and what attends, as [total, width].
  struct Inputs {
    ConstTensorView tokens;
    ConstTensorView queries;
  };
  Inputs inputs(const Context& context, const CachedTokens& tokens, const RowLists& lists) const;
  /// Where to write rows of out; finish() then copies them where that is not out itself. Padding
  /// becomes 0.
  const TensorView& output() const noexcept { return output_; }
  void finish(const Context& context, const CachedTokens& tokens, const RowLists& lists,
              const TensorView& out) const;

 private:
  InputTokens input_;
  std::optional<InputTokens> query_;  // where it is not x
  bool staged_output_;
  TensorView output_;
};

}  // namespace ladon
