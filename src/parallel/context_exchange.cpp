// Context-parallel attention by exchange ("Ulysses"): ranks give away the tokens of all heads but
// their own, and receive all tokens of their own heads; attention runs over whole sequences, and
// the results go back the same way, a few heads at a time: those of the next heads come and those
// of the last ones go while a rank computes. Where there are fewer KV heads than ranks, several
// ranks have the same KV head, and the owner of a key adds their terms of dk and dv in the order of
// ranks.

#include <algorithm>
#include <memory>
#include <utility>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/array_exchange.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"

namespace ladon {
namespace {

/// Whose heads and tokens are whose.
class HeadShares {
 public:
  HeadShares(const ContextCall& own, const CollectiveCall& call)
      : own_(own), rank_(call.rank()), ranks_(call.size()) {}

  int rank() const { return rank_; }
  /// Of one rank: query heads, KV heads, and query heads that share a KV head.
  std::int64_t num_heads() const { return sizes().num_heads / ranks_; }
  std::int64_t num_kv_heads() const {
    return std::max<std::int64_t>(1, sizes().num_kv_heads / ranks_);
  }
  std::int64_t group() const { return num_heads() / num_kv_heads(); }
  bool repeats_kv_heads() const { return sizes().num_kv_heads < ranks_; }

  /// Some of a rank's own heads, of which 0 is the first, among all.
  Range heads_of(int rank, bool is_key, const Range& heads) const {
    const std::int64_t first =
        share_of(is_key ? sizes().num_kv_heads : sizes().num_heads, rank, ranks_).begin;
    return {first + heads.begin, first + heads.end};
  }
  std::span<const TokenRange> tokens_of(int rank, bool is_key) const {
    return is_key ? own_.whole.keys_of(rank) : own_.whole.queries_of(rank);
  }
  std::int64_t num_tokens(bool is_key) const { return is_key ? sizes().kv_len : sizes().query_len; }
  const ContextCall& own() const { return own_; }

  /// Query heads of each rank that are exchanged together: they share a KV head, or have whole
  /// ones.
  std::vector<Range> stages() const {
    std::int64_t at_once = own_.whole.kv_heads_at_once() * group();
    if (at_once == 0) {
      at_once = heads_at_once(own_, num_heads(),
                              sizes().batch * sizes().query_len * sizes().head_dim *
                                  static_cast<std::int64_t>(size_of(own_.q.dtype())));
    }
    if (at_once >= group()) return stages_of(num_heads(), at_once / group() * group());
    while (group() % at_once != 0) --at_once;
    return stages_of(num_heads(), at_once);
  }

 private:
  const AttentionSizes& sizes() const { return own_.whole.sizes(); }

  const ContextCall& own_;
  const int rank_;
  const int ranks_;
};

/// An array with tokens and heads: [batch, tokens, heads, dim], or [batch, heads, tokens] of
/// rank 3. A rank has its own tokens of all heads, or all tokens of some of its own heads.
struct HeadArray {
  TensorView by_tokens;
  TensorView by_heads;
  bool is_key = false;  // its tokens and heads are those of keys
  Range heads{};        // of a rank's own

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
  Arrays arrays_of(int tokens) const {
    Arrays arrays;
    for (const HeadArray& array : arrays_) {
      Dims shape = array.by_heads.shape();
      shape[array.token_dim()] = total_length(shares_.tokens_of(tokens, array.is_key));
      arrays.push_back({array.by_heads.dtype(), shape});
    }
    return arrays;
  }
  TensorView heads_of(const HeadArray& array, int rank) const {
    const Range heads = shares_.heads_of(rank, array.is_key, array.heads);
    return array.by_tokens.slice(array.head_dim(), heads.begin, heads.end);
  }

  const HeadShares& shares_;
  std::vector<HeadArray> arrays_;
};

/// From own tokens of all heads to all tokens of own heads.
class ToHeads final : public HeadExchange {
 public:
  using HeadExchange::HeadExchange;

  /// Memory for all tokens of some heads.
  Tensor add_input(const ConstTensorView& input, bool is_key, const Range& heads) {
    // The input is only read.
    const TensorView by_tokens(const_cast<void*>(input.data()), input.dtype(), input.shape(),
                               input.strides(), input.device());
    HeadArray array{by_tokens, {}, is_key, heads};
    Dims shape = input.shape();
    shape[array.token_dim()] = shares_.num_tokens(is_key);
    shape[array.head_dim()] = heads.length();
    Tensor whole = Tensor::uninitialized(shares_.own().context, input.dtype(), shape);
    array.by_heads = whole;
    add(array);
    return whole;
  }

  Arrays outgoing(int /*other*/) const override { return arrays_of(shares_.rank()); }
  Arrays incoming(int other) const override { return arrays_of(other); }
  void pack(int other, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      copy(shares_.own().context, heads_of(arrays_[i], other), arrays[i]);
    }
  }
  void unpack(int other, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const HeadArray& array = arrays_[i];
      put_tokens(shares_.own().context, arrays[i], shares_.tokens_of(other, array.is_key),
                 array.token_dim(), array.by_heads);
    }
  }
};

/// And back. Where ranks repeat a KV head, its terms are added.
class ToTokens final : public HeadExchange {
 public:
  using HeadExchange::HeadExchange;

  Arrays outgoing(int other) const override { return arrays_of(other); }
  Arrays incoming(int /*other*/) const override { return arrays_of(shares_.rank()); }
  void pack(int other, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const HeadArray& array = arrays_[i];
      take_tokens(shares_.own().context, array.by_heads, shares_.tokens_of(other, array.is_key),
                  array.token_dim(), arrays[i]);
    }
  }
  void unpack(int other, std::span<const TensorView> arrays) override {
    const Context& context = shares_.own().context;
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      const auto first_head = [&](int rank) {
        return shares_.heads_of(rank, arrays_[i].is_key, arrays_[i].heads).begin;
      };
      const TensorView to = heads_of(arrays_[i], other);
      if (other == 0 || first_head(other - 1) != first_head(other)) {
        copy(context, arrays[i], to);
        continue;
      }
      const Tensor term = on_device(context, arrays[i]);
      add_to(context, term, to);
      context.synchronize();
    }
  }
};

/// All tokens of some KV heads: those of one stage, or one that several stages in a row share.
struct KeyHeads {
  Range heads{};  // of a rank's own
  Tensor k;
  Tensor v;
  // Backward: terms of these heads, where several stages add to them.
  Tensor dk;
  Tensor dv;

  /// They come with the first stage of a KV head.
  void bring(ToHeads& to_heads, const HeadShares& shares, const Range& query_heads) {
    if (k.rank() != 0) return;
    const std::int64_t group = shares.group();
    heads = {query_heads.begin / group, (query_heads.end + group - 1) / group};
    k = to_heads.add_input(shares.own().k, true, heads);
    v = to_heads.add_input(shares.own().v, true, heads);
  }
};

/// Attention of some of this rank's heads over whole sequences.
class ExchangeStage {
 public:
  /// Where the heads share a KV head with those of the stage before, `keys` are that stage's.
  ExchangeStage(const HeadShares& shares, const Range& heads, std::shared_ptr<KeyHeads> keys,
                ContextResults& results)
      : shares_(shares),
        heads_(heads),
        keys_(std::move(keys)),
        to_heads_(shares),
        to_tokens_(shares) {
    const ContextCall& own = shares.own();
    q_ = to_heads_.add_input(own.q, false, heads);
    keys_->bring(to_heads_, shares, heads);
    const auto add_result = [&](Tensor& result, Tensor& local) {
      if (result.rank() == 0) return;
      HeadArray array{result, {}, false, heads};
      Dims shape = result.shape();
      shape[array.token_dim()] = shares.num_tokens(false);
      shape[array.head_dim()] = heads.length();
      local = Tensor::uninitialized(own.context, result.dtype(), shape);
      array.by_heads = local;
      to_tokens_.add(array);
    };
    add_result(results.out, out_);
    add_result(results.lse, lse_);
  }

  ExchangePart* inputs() { return &to_heads_; }
  ExchangePart* results() { return &to_tokens_; }

  void compute() {
    const ContextCall& own = shares_.own();
    const Range heads = shares_.heads_of(shares_.rank(), false, heads_);
    attend(own.context, q_, keys_->k, keys_->v, own.whole.options_of(heads), out_, present(lse_),
           {.group = own.whole.group()});
    own.context.synchronize();
    q_ = {};
    keys_.reset();
  }

 private:
  const HeadShares& shares_;
  const Range heads_;
  std::shared_ptr<KeyHeads> keys_;
  ToHeads to_heads_;
  ToTokens to_tokens_;
  Tensor q_;
  Tensor out_;
  Tensor lse_;
};

/// The same backward. Terms of dk and dv go with the last stage of a KV head.
class ExchangeBackwardStage {
 public:
  ExchangeBackwardStage(const HeadShares& shares, const Range& heads,
                        std::shared_ptr<KeyHeads> keys, ContextGradients& gradients)
      : shares_(shares),
        heads_(heads),
        keys_(std::move(keys)),
        gradients_(gradients),
        to_heads_(shares),
        to_tokens_(shares) {
    const ContextCall& own = shares.own();
    q_ = to_heads_.add_input(own.q, false, heads);
    keys_->bring(to_heads_, shares, heads);
    out_ = to_heads_.add_input(own.saved.out, false, heads);
    lse_ = to_heads_.add_input(own.saved.lse, false, heads);
    dout_ = to_heads_.add_input(own.saved.dout, false, heads);
    if (!own.saved.dlse.absent()) dlse_ = to_heads_.add_input(own.saved.dlse, false, heads);
  }

  ExchangePart* inputs() { return &to_heads_; }
  ExchangePart* results() { return &to_tokens_; }

  void compute() {
    const ContextCall& own = shares_.own();
    const Range heads = shares_.heads_of(shares_.rank(), false, heads_);
    const AttentionOptions options = own.whole.options_of(heads);
    SideGradients of_options(own, options);
    AttentionGradients views;
    of_options.add_views(views);
    const auto want = [&](const Tensor& result, DType dtype, const Tensor& like, Tensor& local,
                          TensorView& view) {
      if (result.rank() == 0) return;
      local = Tensor::uninitialized(own.context, dtype, like.shape());
      view = local;
    };
    // Several terms of a KV head are added in the dtype of sums.
    const bool adds = heads_.length() < shares_.group();
    const auto dtype_of = [&](const Tensor& result) {
      return adds ? compute_dtype(result.dtype()) : result.dtype();
    };
    want(gradients_.dq, gradients_.dq.dtype(), q_, dq_, views.dq);
    want(gradients_.dk, dtype_of(gradients_.dk), keys_->k, dk_, views.dk);
    want(gradients_.dv, dtype_of(gradients_.dv), keys_->v, dv_, views.dv);
    attend_backward(own.context, q_, keys_->k, keys_->v, options,
                    {.out = out_, .lse = lse_, .dout = dout_, .dlse = present(dlse_)}, views);
    of_options.add({}, heads, gradients_);
    if (gradients_.dq.rank() != 0) to_tokens_.add({gradients_.dq, dq_, false, heads_});
    add_term(gradients_.dk, keys_->dk, dk_);
    add_term(gradients_.dv, keys_->dv, dv_);
    own.context.synchronize();
    for (Tensor* input : {&q_, &out_, &lse_, &dout_, &dlse_}) *input = {};
    keys_.reset();
  }

 private:
  /// Adds this stage's term of dk or dv, and sends the sum where it is complete.
  void add_term(Tensor& result, Tensor& sum, Tensor& term) {
    if (result.rank() == 0) return;
    const Context& context = shares_.own().context;
    if (sum.rank() == 0) {
      sum = std::move(term);
    } else {
      add_to(context, term, sum);
      context.synchronize();  // before `term` is freed
    }
    if (heads_.end % shares_.group() != 0) return;
    term = sum.dtype() == result.dtype() ? std::move(sum)
                                         : Tensor::copy_of(context, sum, result.dtype());
    to_tokens_.add({result, term, true, keys_->heads});
  }

  const HeadShares& shares_;
  const Range heads_;
  std::shared_ptr<KeyHeads> keys_;
  ContextGradients& gradients_;
  ToHeads to_heads_;
  ToTokens to_tokens_;
  Tensor q_, out_, lse_, dout_, dlse_;
  Tensor dq_, dk_, dv_;
};

/// Runs the stages of a call; those that share a KV head have the same keys.
template <class Stage, class Results>
void run_head_stages(const HeadShares& shares, CollectiveCall& call, Results& results) {
  const std::vector<Range> stages = shares.stages();
  std::shared_ptr<KeyHeads> keys;
  run_stages(call, stages.size(), [&](std::size_t i) {
    if (stages[i].begin % shares.group() == 0) keys = std::make_shared<KeyHeads>();
    return std::make_unique<Stage>(shares, stages[i], keys, results);
  });
}

}  // namespace

void attend_exchanged(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  run_head_stages<ExchangeStage>(HeadShares(own, call), call, results);
}

void attend_exchanged_backward(const ContextCall& own, CollectiveCall& call,
                               ContextGradients& gradients) {
  const HeadShares shares(own, call);
  // Terms that are to be added travel in the dtype of sums.
  Tensor* const results[] = {&gradients.dk, &gradients.dv};
  Tensor rounded[2];
  for (std::size_t i = 0; i < 2; ++i) {
    if (!shares.repeats_kv_heads() || results[i]->rank() == 0) continue;
    rounded[i] = std::move(*results[i]);
    *results[i] = Tensor(own.context, compute_dtype(rounded[i].dtype()), rounded[i].shape());
  }
  run_head_stages<ExchangeBackwardStage>(shares, call, gradients);
  for (std::size_t i = 0; i < 2; ++i) {
    if (rounded[i].rank() == 0) continue;
    copy(own.context, *results[i], rounded[i]);
    own.context.synchronize();
    *results[i] = std::move(rounded[i]);
  }
}

}  // namespace ladon
