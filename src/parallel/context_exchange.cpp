// Context-parallel attention by exchange ("Ulysses"): ranks give away the tokens of all heads but
// their own, and receive all tokens of their own heads; attention runs over whole sequences, and
// the results go back the same way, a few heads at a time: those of the next heads come and those
// of the last ones go while a rank computes. A rank with few heads also takes the queries of one
// sequence in parts, with the keys that they may see. Where there are fewer KV heads than ranks,
// several ranks have the same KV head, and the owner of a key adds their terms of dk and dv in the
// order of ranks.

#include <memory>
#include <utility>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/head_exchange.h"

namespace ladon {
namespace {

/// All tokens of some KV heads: those of one stage, or some that several stages in a row share.
struct KeyHeads {
  Range heads{};  // of a rank's own
  Tensor k;
  Tensor v;
  std::int64_t arrived = 0;  // tokens
  // Backward: terms of these heads, where several stages add to them.
  Tensor dk;
  Tensor dv;

  /// They come with the first stages of a KV head. Those that have not come are 0.
  void bring(ToHeads& to_heads, const HeadShares& shares, const HeadStage& stage) {
    const ContextCall& own = shares.own();
    if (k.rank() == 0) {
      const std::int64_t group = shares.group();
      heads = {stage.heads.begin / group, (stage.heads.end + group - 1) / group};
      const auto make = [&](const ConstTensorView& input) {
        Dims shape = input.shape();
        shape[1] = own.whole.sizes().kv_len;
        shape[2] = heads.length();
        return shares.has_parts() ? Tensor(own.context, input.dtype(), shape)
                                  : Tensor::uninitialized(own.context, input.dtype(), shape);
      };
      k = make(own.k);
      v = make(own.v);
    }
    if (stage.keys_end <= arrived) return;
    const TokenRange coming{arrived, stage.keys_end};
    arrived = stage.keys_end;
    const auto add = [&](const ConstTensorView& input, Tensor& all) {
      to_heads.add_input(input, true, heads, coming, all.view().slice(1, coming.begin, coming.end));
    };
    add(own.k, k);
    add(own.v, v);
  }
};

/// One call of attention: over the whole, or for a part of the queries of its only sequence.
struct StageCall {
  StageCall(const HeadShares& shares, const HeadStage& stage)
      : heads(shares.heads_of(shares.rank(), false, stage.heads)) {
    const WholeAttention& attention = shares.own().whole;
    if (shares.has_parts()) {
      piece.first = stage.queries.begin;
      piece.length = stage.queries.length();
      options = attention.options_of(piece, heads);
      whole = attention.whole_of(piece);
    } else {
      options = attention.options_of(heads);
      whole.group = attention.group();
    }
  }

  Range heads;  // among all
  QueryPiece piece;
  AttentionOptions options;
  WholeProblem whole;
};

/// Attention of some of this rank's heads.
class ExchangeStage {
 public:
  /// Where the heads share a KV head with those of the stage before, `keys` are that stage's.
  ExchangeStage(const HeadShares& shares, const HeadStage& stage, std::shared_ptr<KeyHeads> keys,
                ContextResults& results)
      : shares_(shares),
        stage_(stage),
        keys_(std::move(keys)),
        to_heads_(shares),
        to_tokens_(shares) {
    q_ = to_heads_.add_input(shares.own().q, stage);
    keys_->bring(to_heads_, shares, stage);
    out_ = to_tokens_.add_result(results.out, stage);
    lse_ = to_tokens_.add_result(results.lse, stage);
  }

  ExchangePart* inputs() { return &to_heads_; }
  ExchangePart* results() { return &to_tokens_; }

  void compute() {
    const Context& context = shares_.own().context;
    const StageCall call(shares_, stage_);
    attend(context, q_, keys_->k, keys_->v, call.options, out_, present(lse_), call.whole);
    context.synchronize();
    q_ = {};
    keys_.reset();
  }

 private:
  const HeadShares& shares_;
  const HeadStage stage_;
  std::shared_ptr<KeyHeads> keys_;
  ToHeads to_heads_;
  ToTokens to_tokens_;
  Tensor q_;
  Tensor out_;
  Tensor lse_;
};

/// The same backward. Sums of dk and dv go when the last stage that sees their keys is computed.
class ExchangeBackwardStage {
 public:
  ExchangeBackwardStage(const HeadShares& shares, const HeadStage& stage,
                        std::shared_ptr<KeyHeads> keys, ContextGradients& gradients)
      : shares_(shares),
        stage_(stage),
        keys_(std::move(keys)),
        gradients_(gradients),
        to_heads_(shares),
        to_tokens_(shares) {
    const ContextCall& own = shares.own();
    q_ = to_heads_.add_input(own.q, stage);
    keys_->bring(to_heads_, shares, stage);
    out_ = to_heads_.add_input(own.saved.out, stage);
    lse_ = to_heads_.add_input(own.saved.lse, stage);
    dout_ = to_heads_.add_input(own.saved.dout, stage);
    if (!own.saved.dlse.absent()) dlse_ = to_heads_.add_input(own.saved.dlse, stage);
  }

  ExchangePart* inputs() { return &to_heads_; }
  ExchangePart* results() { return &to_tokens_; }

  void compute() {
    const ContextCall& own = shares_.own();
    const StageCall call(shares_, stage_);
    SideGradients of_options(own, call.options);
    AttentionGradients views;
    of_options.add_views(views);
    const auto want = [&](const Tensor& result, DType dtype, const Tensor& like, Tensor& local,
                          TensorView& view) {
      if (result.rank() == 0) return;
      local = Tensor::uninitialized(own.context, dtype, like.shape());
      view = local;
    };
    // Several terms of a KV head are added in the dtype of sums.
    const bool adds = stage_.heads.length() < shares_.group() || shares_.has_parts();
    const auto dtype_of = [&](const Tensor& result) {
      return adds ? compute_dtype(result.dtype()) : result.dtype();
    };
    dq_ = to_tokens_.add_result(gradients_.dq, stage_);
    if (dq_.rank() != 0) views.dq = dq_;
    want(gradients_.dk, dtype_of(gradients_.dk), keys_->k, dk_, views.dk);
    want(gradients_.dv, dtype_of(gradients_.dv), keys_->v, dv_, views.dv);
    attend_backward(own.context, q_, keys_->k, keys_->v, call.options,
                    {.out = out_, .lse = lse_, .dout = dout_, .dlse = present(dlse_)}, views);
    of_options.add(call.piece, call.heads, gradients_);
    add_term(gradients_.dk, keys_->dk, dk_);
    add_term(gradients_.dv, keys_->dv, dv_);
    own.context.synchronize();
    for (Tensor* input : {&q_, &out_, &lse_, &dout_, &dlse_}) *input = {};
    keys_.reset();
  }

 private:
  /// Adds this stage's term of dk or dv, and sends the sums that are complete.
  void add_term(Tensor& result, Tensor& sum, Tensor& term) {
    if (result.rank() == 0) return;
    const Context& context = shares_.own().context;
    if (sum.rank() == 0) {
      sum = std::move(term);
    } else {
      add_to(context, term, sum);
      context.synchronize();  // before `term` is freed
    }
    const TokenRange& done = stage_.keys_done;
    if (done.length() == 0) return;
    if (done.length() == sum.size(1) && sum.dtype() == result.dtype()) {
      term = std::move(sum);
    } else {
      term = Tensor::copy_of(context, sum.view().slice(1, done.begin, done.end), result.dtype());
    }
    to_tokens_.add({result, term, true, keys_->heads, done});
  }

  const HeadShares& shares_;
  const HeadStage stage_;
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
  const std::vector<HeadStage>& stages = shares.stages();
  std::shared_ptr<KeyHeads> keys;
  run_stages(call, stages.size(), [&](std::size_t i) {
    if (i == 0 || stages[i - 1].is_last_of_keys) keys = std::make_shared<KeyHeads>();
    return std::make_unique<Stage>(shares, stages[i], keys, results);
  });
}

}  // namespace

void attend_exchanged(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  run_head_stages<ExchangeStage>(HeadShares(own, call, false), call, results);
}

void attend_exchanged_backward(const ContextCall& own, CollectiveCall& call,
                               ContextGradients& gradients) {
  const HeadShares shares(own, call, true);
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
