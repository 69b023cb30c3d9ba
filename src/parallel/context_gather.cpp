// Context-parallel attention by all-gathered keys: every rank receives the keys and values that its
// queries may see, for a few KV heads at a time, the next ones while it computes, and attends.
// Backward gathers again, and sends its terms of dk and dv back to the owners of the keys, while it
// computes with the next heads; the owners add them in the order of ranks.

#include <optional>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/array_exchange.h"
#include "parallel/context_schemes.h"

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

/// Keys and values of some KV heads: a rank is sent those that its queries may see.
class GatheredKeys final : public ExchangePart {
 public:
  GatheredKeys(const ContextCall& own, int rank, const Range& heads)
      : own_(own), rank_(rank), heads_(heads) {
    const AttentionSizes& sizes = own_.whole.sizes();
    k_ = Tensor::uninitialized(own.context, own.k.dtype(),
                               {sizes.batch, sizes.kv_len, heads.length(), sizes.head_dim});
    v_ = Tensor::uninitialized(own.context, own.v.dtype(),
                               {sizes.batch, sizes.kv_len, heads.length(), sizes.value_dim});
    put_tokens(own.context, own_k(), own.whole.keys_of(rank), 1, k_);
    put_tokens(own.context, own_v(), own.whole.keys_of(rank), 1, v_);
  }

  Arrays outgoing(int other) const override { return arrays_of(rank_, other); }
  Arrays incoming(int other) const override { return arrays_of(other, rank_); }

  void pack(int other, std::span<const TensorView> arrays) override {
    const auto take = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
      copy(own_.context, own_k().slice(1, local, local + count),
           arrays[0].slice(1, first, first + count));
      copy(own_.context, own_v().slice(1, local, local + count),
           arrays[1].slice(1, first, first + count));
    };
    for_each_own(own_.whole.keys_of(rank_), own_.whole.keys_between(rank_, other), take);
  }

  void unpack(int other, std::span<const TensorView> arrays) override {
    const std::vector<TokenRange> keys = own_.whole.keys_between(other, rank_);
    put_tokens(own_.context, arrays[0], keys, 1, k_);
    put_tokens(own_.context, arrays[1], keys, 1, v_);
  }
  void complete() override { own_.context.synchronize(); }  // before the messages are freed

  /// The keys or values of one sequence. Those that this rank's queries may not see are not set.
  ConstTensorView k_of(const QueryPiece& piece) const { return sequence(k_, piece); }
  ConstTensorView v_of(const QueryPiece& piece) const { return sequence(v_, piece); }

 private:
  ConstTensorView own_k() const { return own_.k.slice(2, heads_.begin, heads_.end); }
  ConstTensorView own_v() const { return own_.v.slice(2, heads_.begin, heads_.end); }
  Arrays arrays_of(int owner, int reader) const {
    if (owner == reader) return {};
    const AttentionSizes& sizes = own_.whole.sizes();
    const std::int64_t tokens = total_length(own_.whole.keys_between(owner, reader));
    return {{own_.k.dtype(), {sizes.batch, tokens, heads_.length(), sizes.head_dim}},
            {own_.v.dtype(), {sizes.batch, tokens, heads_.length(), sizes.value_dim}}};
  }
  ConstTensorView sequence(const Tensor& tensor, const QueryPiece& piece) const {
    const TokenRange keys = own_.whole.keys_of_sequence(piece.sequence);
    return tensor.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
  }

  const ContextCall& own_;
  const int rank_;
  const Range heads_;
  Tensor k_;
  Tensor v_;
};

/// This rank's terms of dk and dv for some KV heads, over all keys; then their sums over ranks for
/// its own keys. Each rank has terms for the keys that its queries may see; the others' are 0.
class KeyGradients final : public ExchangePart {
 public:
  KeyGradients(const ContextCall& own, int rank, const Range& heads, ContextGradients& gradients)
      : own_(own), rank_(rank), heads_(heads) {
    const auto want = [&](Tensor& result, TensorView AttentionGradients::*view) {
      if (result.rank() == 0) return;
      const Dims shape{result.size(0), own.whole.sizes().kv_len, heads.length(), result.size(3)};
      const DType dtype = compute_dtype(result.dtype());
      sums_.push_back({result, view, Tensor(own.context, dtype, shape), {}, {}});
    };
    want(gradients.dk, &AttentionGradients::dk);
    want(gradients.dv, &AttentionGradients::dv);
  }

  bool wanted() const { return !sums_.empty(); }

  /// Memory for the terms of one piece: add_views(), attend_backward(), add().
  void add_views(const QueryPiece& piece, AttentionGradients& gradients) {
    for (Sum& sum : sums_) {
      sum.piece =
          Tensor::uninitialized(own_.context, sum.terms.dtype(), keys_of(piece, sum.terms).shape());
      gradients.*sum.view = sum.piece;
    }
  }
  void add(const QueryPiece& piece) {
    for (Sum& sum : sums_) add_to(own_.context, sum.piece, keys_of(piece, sum.terms));
  }

  Arrays outgoing(int other) const override { return arrays_of(other, rank_); }
  Arrays incoming(int other) const override { return arrays_of(rank_, other); }

  void pack(int other, std::span<const TensorView> arrays) override {
    const std::vector<TokenRange> keys = own_.whole.keys_between(other, rank_);
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      take_tokens(own_.context, sums_[i].terms, keys, 1, arrays[i]);
    }
  }
  void unpack(int other, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < sums_.size(); ++i) {
      Tensor& sum = sums_[i].sum;
      if (sum.rank() == 0) {
        sum = Tensor(own_.context, sums_[i].terms.dtype(), result_of(sums_[i]).shape());
      }
      const auto add = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
        const Tensor term = Tensor::copy_of(own_.context, arrays[i].slice(1, first, first + count));
        add_to(own_.context, term, sum.view().slice(1, local, local + count));
        own_.context.synchronize();  // before `term` is freed
      };
      for_each_own(own_.whole.keys_of(rank_), own_.whole.keys_between(rank_, other), add);
    }
  }
  void complete() override {
    for (const Sum& sum : sums_) copy(own_.context, sum.sum, result_of(sum));
    own_.context.synchronize();
  }

 private:
  /// Of dk or dv.
  struct Sum {
    Tensor& result;  // of own keys and all KV heads
    TensorView AttentionGradients::*view;
    Tensor terms;  // of all keys
    Tensor piece;  // those of one piece
    Tensor sum;    // of own keys, over ranks
  };

  TensorView result_of(const Sum& sum) const {
    return sum.result.view().slice(2, heads_.begin, heads_.end);
  }
  TensorView keys_of(const QueryPiece& piece, Tensor& terms) const {
    const TokenRange keys = own_.whole.keys_of_sequence(piece.sequence);
    return terms.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
  }
  Arrays arrays_of(int owner, int reader) const {
    const std::int64_t tokens = total_length(own_.whole.keys_between(owner, reader));
    Arrays arrays;
    for (const Sum& sum : sums_) {
      Dims shape = sum.terms.shape();
      shape[1] = tokens;
      arrays.push_back({sum.terms.dtype(), shape});
    }
    return arrays;
  }

  const ContextCall& own_;
  const int rank_;
  const Range heads_;
  std::vector<Sum> sums_;
};

/// Attention of a rank's queries over some KV heads.
class GatherStage {
 public:
  GatherStage(const ContextCall& own, CollectiveCall& call, const Range& kv_heads,
              ContextResults& results)
      : own_(own),
        call_(call),
        heads_(query_heads(own, kv_heads)),
        keys_(own, call.rank(), kv_heads),
        results_(results) {}

  ExchangePart* inputs() { return &keys_; }
  static ExchangePart* results() { return nullptr; }

  void compute() {
    for (const QueryPiece& piece : own_.whole.pieces_of(own_.whole.queries_of(call_.rank()))) {
      attend(own_.context, rows_of(own_.q, piece, heads_), keys_.k_of(piece), keys_.v_of(piece),
             own_.whole.options_of(piece, heads_), rows_of(results_.out.view(), piece, heads_),
             lse_of(present(results_.lse), piece, heads_), own_.whole.whole_of(piece));
      call_.poll();
    }
    own_.context.synchronize();
  }

 private:
  const ContextCall& own_;
  CollectiveCall& call_;
  const Range heads_;
  GatheredKeys keys_;
  ContextResults& results_;
};

/// The same backward.
class GatherBackwardStage {
 public:
  GatherBackwardStage(const ContextCall& own, CollectiveCall& call, const Range& kv_heads,
                      ContextGradients& gradients)
      : own_(own),
        call_(call),
        kv_heads_(kv_heads),
        keys_(std::in_place, own, call.rank(), kv_heads),
        gradients_(gradients) {}

  ExchangePart* inputs() { return &*keys_; }
  ExchangePart* results() { return of_keys_->wanted() ? &*of_keys_ : nullptr; }

  void compute() {
    const Range heads = query_heads(own_, kv_heads_);
    of_keys_.emplace(own_, call_.rank(), kv_heads_, gradients_);
    for (const QueryPiece& piece : own_.whole.pieces_of(own_.whole.queries_of(call_.rank()))) {
      const AttentionOptions options = own_.whole.options_of(piece, heads);
      SideGradients of_options(own_, options);
      AttentionGradients views{.dq = rows_of(present(gradients_.dq), piece, heads)};
      of_keys_->add_views(piece, views);
      of_options.add_views(views);
      attend_backward(own_.context, rows_of(own_.q, piece, heads), keys_->k_of(piece),
                      keys_->v_of(piece), options,
                      {.out = rows_of(own_.saved.out, piece, heads),
                       .lse = lse_of(own_.saved.lse, piece, heads),
                       .dout = rows_of(own_.saved.dout, piece, heads),
                       .dlse = lse_of(own_.saved.dlse, piece, heads)},
                      views);
      of_keys_->add(piece);
      of_options.add(piece, heads, gradients_);
      call_.poll();
      own_.context.synchronize();
    }
    keys_.reset();
  }

 private:
  const ContextCall& own_;
  CollectiveCall& call_;
  const Range kv_heads_;
  std::optional<GatheredKeys> keys_;
  std::optional<KeyGradients> of_keys_;
  ContextGradients& gradients_;
};

}  // namespace

void attend_gathered(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  const std::vector<Range> groups = head_groups(own);
  run_stages(call, groups.size(), [&](std::size_t i) {
    return std::make_unique<GatherStage>(own, call, groups[i], results);
  });
}

void attend_gathered_backward(const ContextCall& own, CollectiveCall& call,
                              ContextGradients& gradients) {
  const std::vector<Range> groups = head_groups(own);
  run_stages(call, groups.size(), [&](std::size_t i) {
    return std::make_unique<GatherBackwardStage>(own, call, groups[i], gradients);
  });
}

}  // namespace ladon
