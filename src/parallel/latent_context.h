// A rank's part of context-parallel LatentAttention: its tokens, and the whole that they belong to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "layers/latent_steps.h"
#include "parallel/context_schemes.h"
#include "parallel/token_exchange.h"

namespace ladon::latent {

/// What forward_training() leaves for backward; keys and values are made again.
class ContextSaved final : public Saved {
 public:
  using Saved::Saved;
  ContextPlan plan;
};

/// A rank's tokens, and the whole that they belong to.
class LatentContext {
 public:
  /// Checks all that can be refused.
  LatentContext(const Operation& operation, const Context& context,
                const Communicator& communicator, const LatentAttention& layer,
                const LayerInputs& inputs, const ContextPlan& plan, const LayerCall& call);
  /// For backward: what was checked before.
  LatentContext(const Operation& operation, const Context& context,
                const Communicator& communicator, const LatentAttention& layer,
                const ContextSaved& saved);

  const WholeAttention& whole() const { return *whole_; }
  const CheckedInputs& inputs() const { return inputs_; }
  const LayerCall& own_call() const { return own_call_; }
  const ContextPlan& plan() const { return plan_; }
  const AttentionOptions& options() const { return options_; }

  void describe(CallSignature& signature) const {
    whole_->describe(context_, signature);
    signature.add("form", static_cast<std::int64_t>(layer_.options().form));
    signature.add("kv_rank", layer_.kv_rank());
    signature.add("rope_dim", layer_.rope_dim());
  }

  /// The latents of all tokens that this rank's queries may see.
  Tensor gather(CollectiveCall& call, const ConstTensorView& own) const {
    GatheredTokens tokens(context_, *whole_, rank_, {own});
    ArrayExchange exchange(call);
    exchange.begin({&tokens});
    exchange.finish();
    return tokens.take(0);
  }

  /// Calls body(heads, keys, values): those of all tokens, for a few heads at a time.
  template <class Body>
  void for_each_expanded(const Tensor& latents, const Body& body) const {
    constexpr std::int64_t kMost = std::int64_t{64} << 20;
    const std::int64_t of_head = latents.size(0) * latents.size(1) *
                                 (layer_.head_dim() + layer_.value_dim()) *
                                 static_cast<std::int64_t>(size_of(layer_.dtype()));
    const std::int64_t at_once =
        plan_.kv_heads_at_once != 0
            ? plan_.kv_heads_at_once
            : std::max<std::int64_t>(1, kMost / std::max<std::int64_t>(1, of_head));
    for (const Range& heads : stages_of(layer_.num_heads(), at_once)) {
      Tensor keys = all_tokens(latents, heads, layer_.head_dim());
      Tensor values = all_tokens(latents, heads, layer_.value_dim());
      steps_.expand_keys(rows_of(latents), heads.begin, heads.length(), merged(keys));
      steps_.expand_values(rows_of(latents), heads.begin, heads.length(), merged(values));
      body(heads, std::as_const(keys), std::as_const(values));
      context_.synchronize();
    }
  }

  template <class Body>
  void for_each_piece(const Body& body) const {
    for (const QueryPiece& piece : whole_->pieces_of(whole_->queries_of(rank_))) body(piece);
  }
  template <class View>
  View keys_of(const QueryPiece& piece, const View& all) const {
    const TokenRange keys = whole_->keys_of_sequence(piece.sequence);
    return all.slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
  }

  /// Attended values of own queries, and lse where it has memory.
  void attend_expanded(const Tensor& latents, AttendedHeads& own) const;
  void attend_absorbed(const Tensor& latents, AttendedHeads& own) const;

 private:
  void check_call(const Operation& operation, const LayerInputs& inputs, const ContextPlan& plan,
                  const LayerCall& call);
  /// Of expanded keys: for checks and pieces, which read no element.
  void make_whole(const Operation& operation, const Communicator& communicator, std::int64_t batch,
                  std::int64_t own_queries, std::int64_t own_keys);

  /// The positions of own tokens.
  RopePositions own_positions(const RopePositions& all,
                              const std::vector<std::vector<TokenRange>>& ranges,
                              std::int64_t length, std::vector<std::int64_t>& memory) const;

  Tensor all_tokens(const Tensor& latents, const Range& heads, std::int64_t dim) const {
    return Tensor::uninitialized(context_, layer_.dtype(),
                                 {latents.size(0), latents.size(1), heads.length(), dim});
  }

  const Context& context_;
  const LatentAttention& layer_;
  const int rank_;
  const Steps steps_;
  CheckedInputs inputs_;
  ContextPlan plan_;
  AttentionOptions options_;
  LayerCall own_call_;
  std::vector<std::int64_t> query_positions_, key_positions_;
  Tensor described_;  // elements that q_, k_ and v_ are views of
  ConstTensorView q_, k_, v_;
  std::optional<WholeAttention> whole_;
};

}  // namespace ladon::latent
