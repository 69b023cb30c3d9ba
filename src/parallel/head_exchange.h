// Tokens and heads between ranks ("Ulysses"): from a rank's own tokens of all heads to all ranks'
// tokens of its own heads, and back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "parallel/array_exchange.h"
#include "parallel/context_schemes.h"
#include "parallel/share.h"

namespace ladon {

/// What is computed between two exchanges.
struct HeadStage {
  Range heads{};                 // of a rank's own
  TokenRange queries{};          // of the whole's
  std::int64_t keys_end = 0;     // the queries, and those before them, see no key from here on
  TokenRange keys_done{};        // no later stage of the same KV heads sees them, but this one may
  bool is_last_of_keys = false;  // no later stage has the same KV heads
};

/// Whose heads and tokens are whose.
class HeadShares {
 public:
  HeadShares(const ContextCall& own, const CollectiveCall& call, bool backward);

  int rank() const { return rank_; }
  const ContextCall& own() const { return own_; }
  /// Query heads of a rank that share a KV head.
  std::int64_t group() const { return num_heads_ / num_kv_heads_; }
  /// Several ranks have the same KV head.
  bool repeats_kv_heads() const { return sizes().num_kv_heads < ranks_; }

  /// Some of a rank's own heads, of which 0 is the first, among all.
  Range heads_of(int rank, bool is_key, const Range& heads) const;
  std::span<const TokenRange> tokens_of(int rank, bool is_key) const {
    return is_key ? own_.whole.keys_of(rank) : own_.whole.queries_of(rank);
  }

  const std::vector<HeadStage>& stages() const { return stages_; }
  /// The queries are computed in parts: those of the only sequence.
  bool has_parts() const { return num_parts_ > 1; }

 private:
  const AttentionSizes& sizes() const { return own_.whole.sizes(); }
  std::int64_t num_heads_at_once() const;
  std::int64_t num_parts(std::int64_t stages_of_heads) const;
  void add_stages(const Range& heads);
  void add_stages_from_the_end(const Range& heads);

  const ContextCall& own_;
  const int rank_;
  const int ranks_;
  // Of one rank.
  const std::int64_t num_heads_;
  const std::int64_t num_kv_heads_;
  std::int64_t num_parts_ = 1;
  std::vector<HeadStage> stages_;
};

/// An array with tokens and heads: [batch, tokens, heads, dim], or [batch, heads, tokens] of
/// rank 3. A rank has its own tokens of all heads, or some tokens of all ranks and some of its own
/// heads.
struct HeadArray {
  TensorView by_tokens;
  TensorView by_heads;
  bool is_key = false;  // its tokens and heads are those of keys
  Range heads{};        // of a rank's own
  TokenRange tokens{};  // of the whole's

  int token_dim() const { return by_tokens.rank() == 4 ? 1 : 2; }
  int head_dim() const { return by_tokens.rank() == 4 ? 2 : 1; }
};

/// What both directions have in common: the tokens of one rank and the heads of another.
class HeadExchange : public ExchangePart {
 public:
  explicit HeadExchange(const HeadShares& shares) : shares_(shares) {}

  void add(const HeadArray& array) { arrays_.push_back(array); }
  void complete() override { shares_.own().context.synchronize(); }  // before messages are freed

 protected:
  /// With a rank's tokens.
  Arrays arrays_of(int rank) const;
  /// A rank's tokens that the array has, among all.
  std::vector<TokenRange> tokens_of(const HeadArray& array, int rank) const;
  /// And in by_heads.
  std::vector<TokenRange> places_of(const HeadArray& array, int rank) const;
  /// Calls body(part of by_tokens with this rank's tokens and another's heads, part of a message).
  template <class Body>
  void for_each_own_run(const HeadArray& array, int other, const TensorView& message,
                        const Body& body) const;

  const HeadShares& shares_;
  std::vector<HeadArray> arrays_;
};

/// From own tokens of all heads to all ranks' tokens of own heads.
class ToHeads final : public HeadExchange {
 public:
  using HeadExchange::HeadExchange;

  /// `by_heads` is where the tokens of some heads are to be written.
  void add_input(const ConstTensorView& input, bool is_key, const Range& heads,
                 const TokenRange& tokens, const TensorView& by_heads);
  /// Of a stage's queries: makes the memory for them.
  Tensor add_input(const ConstTensorView& input, const HeadStage& stage);

  Arrays outgoing(int /*other*/) const override { return arrays_of(shares_.rank()); }
  Arrays incoming(int other) const override { return arrays_of(other); }
  void pack(int other, std::span<const TensorView> arrays) override;
  void unpack(int other, std::span<const TensorView> arrays) override;
};

/// And back. Where ranks repeat a KV head, its terms are added in the order of ranks.
class ToTokens final : public HeadExchange {
 public:
  using HeadExchange::HeadExchange;

  /// Of a stage's queries: makes the memory for them.
  Tensor add_result(Tensor& result, const HeadStage& stage);

  Arrays outgoing(int other) const override { return arrays_of(other); }
  Arrays incoming(int /*other*/) const override { return arrays_of(shares_.rank()); }
  void pack(int other, std::span<const TensorView> arrays) override;
  void unpack(int other, std::span<const TensorView> arrays) override;
};

}  // namespace ladon
