// Context-parallel attention by exchange ("Ulysses"): ranks give away the tokens of all heads but
// their own, and receive all tokens of their own heads; attention runs over whole sequences, and
// the results go back the same way. Where there are fewer KV heads than ranks, several ranks have
// the same KV head, and the owner of a key adds their terms of dk and dv in the order of ranks.

#include <algorithm>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"
#include "parallel/message_layout.h"

namespace ladon {
namespace {

/// An array with tokens and heads, of which every rank owns tokens before the exchange and heads
/// after it: [batch, tokens, heads, dim], or [batch, heads, tokens] of rank 3.
struct Exchanged {
  DType dtype = DType::kF32;
  Dims shape;           // with all tokens and all heads
  bool is_key = false;  // its tokens and heads are those of keys

  int token_dim() const { return shape.rank() == 4 ? 1 : 2; }
  int head_dim() const { return shape.rank() == 4 ? 2 : 1; }
};

class HeadExchange {
 public:
  HeadExchange(const ContextCall& own, CollectiveCall& call) : own_(own), call_(call) {}

  Range heads_of(int rank, bool is_key) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    Range heads = share_of(is_key ? sizes.num_kv_heads : sizes.num_heads, rank, call_.size());
    heads.end = std::max(heads.begin + 1, heads.end);
    return heads;
  }
  bool repeats_kv_heads() const { return own_.whole.sizes().num_kv_heads < call_.size(); }

  /// From own tokens of all heads to all tokens of own heads.
  std::vector<Tensor> to_heads(std::span<const ConstTensorView> views,
                               std::span<const bool> is_key) {
    std::vector<Exchanged> arrays;
    for (std::size_t i = 0; i < views.size(); ++i) {
      arrays.push_back(described(views[i].dtype(), views[i].shape(), is_key[i]));
    }
    const auto layout_of = [&](int tokens_of, int heads_of) {
      return layout(arrays, tokens_of, heads_of);
    };
    std::vector<Tensor> outgoing, incoming;
    for (int other = 0; other < call_.size(); ++other) {
      const MessageLayout sent = layout_of(call_.rank(), other);
      Tensor& message = outgoing.emplace_back(sent.allocate());
      for (std::size_t i = 0; i < views.size(); ++i) {
        const Range heads = heads_of(other, is_key[i]);
        copy(own_.context, views[i].slice(arrays[i].head_dim(), heads.begin, heads.end),
             sent.array(message, i));
      }
      incoming.push_back(layout_of(other, call_.rank()).allocate());
    }
    begin_exchange(call_, outgoing, incoming);
    call_.wait();
    std::vector<Tensor> whole;
    for (const Exchanged& array : arrays) {
      Dims shape = array.shape;
      const Range heads = heads_of(call_.rank(), array.is_key);
      shape[array.head_dim()] = heads.length();
      whole.push_back(Tensor::uninitialized(own_.context, array.dtype, shape));
    }
    for (int other = 0; other < call_.size(); ++other) {
      const MessageLayout received = layout_of(other, call_.rank());
      for (std::size_t i = 0; i < arrays.size(); ++i) {
        put_tokens(own_.context, received.array(incoming[static_cast<std::size_t>(other)], i),
                   tokens_of(other, arrays[i].is_key), arrays[i].token_dim(), whole[i]);
      }
    }
    own_.context.synchronize();
    return whole;
  }

  /// And back: from all tokens of own heads into `results`, own tokens of all heads. Where ranks
  /// repeat a KV head, its terms are added.
  void to_tokens(std::span<const ConstTensorView> views, std::span<const bool> is_key,
                 std::span<Tensor* const> results) {
    std::vector<Exchanged> arrays;
    for (std::size_t i = 0; i < views.size(); ++i) {
      arrays.push_back(described(views[i].dtype(), views[i].shape(), is_key[i]));
    }
    std::vector<Tensor> outgoing, incoming;
    for (int other = 0; other < call_.size(); ++other) {
      const MessageLayout sent = layout(arrays, other, call_.rank());
      Tensor& message = outgoing.emplace_back(sent.allocate());
      for (std::size_t i = 0; i < views.size(); ++i) {
        take_tokens(own_.context, views[i], tokens_of(other, is_key[i]), arrays[i].token_dim(),
                    sent.array(message, i));
      }
      incoming.push_back(layout(arrays, call_.rank(), other).allocate());
    }
    begin_exchange(call_, outgoing, incoming);
    call_.wait();
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      for (int other = 0; other < call_.size(); ++other) {
        const MessageLayout received = layout(arrays, call_.rank(), other);
        const ConstTensorView part = received.array(incoming[static_cast<std::size_t>(other)], i);
        const Range heads = heads_of(other, is_key[i]);
        const TensorView to =
            results[i]->view().slice(arrays[i].head_dim(), heads.begin, heads.end);
        const bool repeats =
            other > 0 && is_key[i] && heads_of(other - 1, true).begin == heads.begin;
        if (!repeats) {
          copy(own_.context, part, to);
          continue;
        }
        Tensor there = Tensor::uninitialized(own_.context, part.dtype(), part.shape());
        copy(own_.context, part, there);
        add_to(own_.context, there, to);
      }
    }
    own_.context.synchronize();
  }

 private:
  Exchanged described(DType dtype, const Dims& shape, bool is_key) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    Exchanged array{dtype, shape, is_key};
    array.shape[array.token_dim()] = is_key ? sizes.kv_len : sizes.query_len;
    array.shape[array.head_dim()] = is_key ? sizes.num_kv_heads : sizes.num_heads;
    return array;
  }
  std::span<const TokenRange> tokens_of(int rank, bool is_key) const {
    return is_key ? own_.whole.keys_of(rank) : own_.whole.queries_of(rank);
  }
  /// The tokens of one rank and the heads of another.
  MessageLayout layout(const std::vector<Exchanged>& arrays, int tokens, int heads) const {
    std::vector<MessageLayout::Array> parts;
    for (const Exchanged& array : arrays) {
      const Range range = heads_of(heads, array.is_key);
      Dims shape = array.shape;
      shape[array.token_dim()] = total_length(tokens_of(tokens, array.is_key));
      shape[array.head_dim()] = range.length();
      parts.push_back({array.dtype, shape});
    }
    return MessageLayout(std::move(parts));
  }

  const ContextCall& own_;
  CollectiveCall& call_;
};

}  // namespace

void attend_exchanged(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  HeadExchange exchange(own, call);
  const ConstTensorView inputs[] = {own.q, own.k, own.v};
  const bool are_keys[] = {false, true, true};
  const std::vector<Tensor> mine = exchange.to_heads(inputs, are_keys);
  const Range heads = exchange.heads_of(call.rank(), false);
  const bool wants_lse = results.lse.rank() != 0;
  const AttentionSizes& sizes = own.whole.sizes();
  const std::int64_t count = heads.length();
  Tensor out = Tensor::uninitialized(own.context, results.out.dtype(),
                                     {sizes.batch, sizes.query_len, count, sizes.value_dim});
  Tensor lse;
  if (wants_lse) {
    lse = Tensor::uninitialized(own.context, results.lse.dtype(),
                                {sizes.batch, count, sizes.query_len});
  }
  attend(own.context, mine[0], mine[1], mine[2], own.whole.options_of(heads), out,
         wants_lse ? lse.view() : TensorView(), {.group = own.whole.group()});
  std::vector<ConstTensorView> views{out};
  std::vector<Tensor*> targets{&results.out};
  if (wants_lse) {
    views.emplace_back(lse);
    targets.push_back(&results.lse);
  }
  const bool no_keys[] = {false, false};
  exchange.to_tokens(views, std::span(no_keys).first(views.size()), targets);
}

void attend_exchanged_backward(const ContextCall& own, CollectiveCall& call,
                               ContextGradients& gradients) {
  HeadExchange exchange(own, call);
  std::vector<ConstTensorView> inputs{own.q,         own.k,         own.v,
                                      own.saved.out, own.saved.lse, own.saved.dout};
  if (!own.saved.dlse.absent()) inputs.push_back(own.saved.dlse);
  const bool are_keys[] = {false, true, true, false, false, false, false};
  const std::vector<Tensor> mine =
      exchange.to_heads(inputs, std::span(are_keys).first(inputs.size()));
  const Range heads = exchange.heads_of(call.rank(), false);
  const AttentionOptions options = own.whole.options_of(heads);
  SideGradients of_options(own, options);
  AttentionGradients views;
  of_options.add_views(views);
  // Terms that are to be added travel in the dtype of sums.
  const bool adds = exchange.repeats_kv_heads();
  Tensor dq, dk, dv;
  std::vector<ConstTensorView> computed;
  std::vector<Tensor*> targets;
  std::vector<Tensor> sums(2);
  bool of_keys[3] = {};
  const auto want = [&](Tensor& local, const Tensor& like, Tensor& target, TensorView& view,
                        Tensor* sum) {
    if (target.rank() == 0) return;
    const bool is_sum = sum != nullptr && adds;
    const DType dtype = is_sum ? compute_dtype(like.dtype()) : target.dtype();
    local = Tensor::uninitialized(own.context, dtype, like.shape());
    view = local;
    if (is_sum) *sum = Tensor(own.context, dtype, target.shape());
    of_keys[computed.size()] = sum != nullptr;
    computed.emplace_back(local);
    targets.push_back(is_sum ? sum : &target);
  };
  want(dq, mine[0], gradients.dq, views.dq, nullptr);
  want(dk, mine[1], gradients.dk, views.dk, &sums[0]);
  want(dv, mine[2], gradients.dv, views.dv, &sums[1]);
  AttentionSaved saved{.out = mine[3], .lse = mine[4], .dout = mine[5]};
  if (mine.size() > 6) saved.dlse = mine[6];
  attend_backward(own.context, mine[0], mine[1], mine[2], options, saved, views);
  of_options.add({}, heads, gradients);
  exchange.to_tokens(computed, std::span(of_keys).first(computed.size()), targets);
  if (adds && gradients.dk.rank() != 0) copy(own.context, sums[0], gradients.dk);
  if (adds && gradients.dv.rank() != 0) copy(own.context, sums[1], gradients.dv);
  own.context.synchronize();
}

}  // namespace ladon
