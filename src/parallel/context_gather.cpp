// Context-parallel attention by all-gathered keys: every rank receives the keys and values that its
// queries may see, for a few KV heads at a time, the next ones while it computes, and attends.
// Backward gathers again, and sends its terms of dk and dv back to the owners of the keys, while it
// computes with the next heads; the owners add them in the order of ranks.

#include <optional>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/context_schemes.h"
#include "parallel/token_exchange.h"

namespace ladon {
namespace {

/// The KV heads that are gathered together.
std::vector<Range> head_groups(const ContextCall& own) {
  const AttentionSizes& sizes = own.whole.sizes();
  const std::int64_t tokens = sizes.batch * sizes.kv_len;
  const std::int64_t bytes = tokens * (sizes.head_dim + sizes.value_dim) *
                             static_cast<std::int64_t>(size_of(own.k.dtype()));
  const std::int64_t at_once = own.whole.kv_heads_at_once();
  return stages_of(sizes.num_kv_heads,
                   at_once != 0 ? at_once : heads_at_once(own, sizes.num_kv_heads, bytes));
}

/// The query heads that read some KV heads.
Range query_heads(const ContextCall& own, const Range& kv_heads) {
  return {kv_heads.begin * own.whole.group(), kv_heads.end * own.whole.group()};
}

/// Keys and values of some KV heads.
GatheredTokens gathered_keys(const ContextCall& own, int rank, const Range& kv_heads) {
  return GatheredTokens(
      own.context, own.whole, rank,
      {own.k.slice(2, kv_heads.begin, kv_heads.end), own.v.slice(2, kv_heads.begin, kv_heads.end)});
}

/// The keys of a piece's sequence, of what has all keys.
ConstTensorView keys_of(const ContextCall& own, const QueryPiece& piece, const Tensor& all) {
  const TokenRange keys = own.whole.keys_of_sequence(piece.sequence);
  return all.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
}
TensorView keys_of(const ContextCall& own, const QueryPiece& piece, Tensor& all) {
  const TokenRange keys = own.whole.keys_of_sequence(piece.sequence);
  return all.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
}

/// This rank's terms of dk and dv for some KV heads.
class KeyGradients {
 public:
  KeyGradients(const ContextCall& own, int rank, const Range& kv_heads, ContextGradients& gradients)
      : own_(own), terms_(own.context, own.whole, rank) {
    const auto want = [&](Tensor& result, TensorView AttentionGradients::*view) {
      if (result.rank() == 0) return;
      Dims shape = result.shape();
      shape[1] = own.whole.sizes().kv_len;
      shape[2] = kv_heads.length();
      terms_.add(Tensor(own.context, compute_dtype(result.dtype()), shape),
                 result.view().slice(2, kv_heads.begin, kv_heads.end));
      views_.push_back(view);
    };
    want(gradients.dk, &AttentionGradients::dk);
    want(gradients.dv, &AttentionGradients::dv);
    pieces_.resize(views_.size());
  }

  ExchangePart* part() { return terms_.empty() ? nullptr : &terms_; }

  /// Memory for the terms of one piece: add_views(), attend_backward(), add().
  void add_views(const QueryPiece& piece, AttentionGradients& gradients) {
    for (std::size_t i = 0; i < views_.size(); ++i) {
      const TensorView terms = keys_of(own_, piece, terms_.terms(i));
      pieces_[i] = Tensor::uninitialized(own_.context, terms.dtype(), terms.shape());
      gradients.*views_[i] = pieces_[i];
    }
  }
  void add(const QueryPiece& piece) {
    for (std::size_t i = 0; i < views_.size(); ++i) {
      add_to(own_.context, pieces_[i], keys_of(own_, piece, terms_.terms(i)));
    }
  }

 private:
  const ContextCall& own_;
  ReturnedTerms terms_;
  // For each of dk and dv that is wanted.
  std::vector<TensorView AttentionGradients::*> views_;
  std::vector<Tensor> pieces_;
};

/// Attention of a rank's queries over some KV heads.
class GatherStage {
 public:
  GatherStage(const ContextCall& own, int rank, const Range& kv_heads, ContextResults& results)
      : own_(own),
        rank_(rank),
        heads_(query_heads(own, kv_heads)),
        keys_(gathered_keys(own, rank, kv_heads)),
        results_(results) {}

  ExchangePart* inputs() { return &keys_; }
  static ExchangePart* results() { return nullptr; }

  void compute() {
    for (const QueryPiece& piece : own_.whole.pieces_of(own_.whole.queries_of(rank_))) {
      attend(own_.context, rows_of(own_.q, piece, heads_), keys_of(own_, piece, keys_.all(0)),
             keys_of(own_, piece, keys_.all(1)), own_.whole.options_of(piece, heads_),
             rows_of(results_.out.view(), piece, heads_),
             lse_of(present(results_.lse), piece, heads_), own_.whole.whole_of(piece));
    }
    own_.context.synchronize();
  }

 private:
  const ContextCall& own_;
  const int rank_;
  const Range heads_;
  GatheredTokens keys_;
  ContextResults& results_;
};

/// The same backward.
class GatherBackwardStage {
 public:
  GatherBackwardStage(const ContextCall& own, int rank, const Range& kv_heads,
                      ContextGradients& gradients)
      : own_(own),
        rank_(rank),
        kv_heads_(kv_heads),
        keys_(gathered_keys(own, rank, kv_heads)),
        gradients_(gradients) {}

  ExchangePart* inputs() { return &*keys_; }
  ExchangePart* results() { return of_keys_->part(); }

  void compute() {
    const Range heads = query_heads(own_, kv_heads_);
    of_keys_.emplace(own_, rank_, kv_heads_, gradients_);
    for (const QueryPiece& piece : own_.whole.pieces_of(own_.whole.queries_of(rank_))) {
      const AttentionOptions options = own_.whole.options_of(piece, heads);
      SideGradients of_options(own_, options);
      AttentionGradients views{.dq = rows_of(present(gradients_.dq), piece, heads)};
      of_keys_->add_views(piece, views);
      of_options.add_views(views);
      attend_backward(own_.context, rows_of(own_.q, piece, heads),
                      keys_of(own_, piece, keys_->all(0)), keys_of(own_, piece, keys_->all(1)),
                      options,
                      {.out = rows_of(own_.saved.out, piece, heads),
                       .lse = lse_of(own_.saved.lse, piece, heads),
                       .dout = rows_of(own_.saved.dout, piece, heads),
                       .dlse = lse_of(own_.saved.dlse, piece, heads)},
                      views);
      of_keys_->add(piece);
      of_options.add(piece, heads, gradients_);
      own_.context.synchronize();
    }
    keys_.reset();
  }

 private:
  const ContextCall& own_;
  const int rank_;
  const Range kv_heads_;
  std::optional<GatheredTokens> keys_;
  std::optional<KeyGradients> of_keys_;
  ContextGradients& gradients_;
};

}  // namespace

void attend_gathered(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  const std::vector<Range> groups = head_groups(own);
  run_stages(call, groups.size(), [&](std::size_t i) {
    return std::make_unique<GatherStage>(own, call.rank(), groups[i], results);
  });
}

void attend_gathered_backward(const ContextCall& own, CollectiveCall& call,
                              ContextGradients& gradients) {
  const std::vector<Range> groups = head_groups(own);
  run_stages(call, groups.size(), [&](std::size_t i) {
    return std::make_unique<GatherBackwardStage>(own, call.rank(), groups[i], gradients);
  });
}

}  // namespace ladon
