// Context-parallel attention by all-gathered keys: every rank receives the keys and values that its
// queries may see, for a few KV heads at a time, the next ones while it computes, and attends.
// Backward gathers again, and sends the sums of dk and dv back to the owners of the keys, who add
// them in the order of ranks.

#include <algorithm>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"
#include "parallel/message_layout.h"

namespace ladon {
namespace {

constexpr std::int64_t kGatheredBytes = std::int64_t{64} << 20;

/// The KV heads that are gathered together.
std::vector<Range> head_groups(const ContextCall& own) {
  const AttentionSizes& sizes = own.whole.sizes();
  std::int64_t at_once = own.whole.kv_heads_at_once();
  if (at_once == 0) {
    const std::int64_t bytes =
        std::max<std::int64_t>(1, sizes.batch * sizes.kv_len * (sizes.head_dim + sizes.value_dim) *
                                      static_cast<std::int64_t>(size_of(own.k.dtype())));
    at_once = std::max<std::int64_t>(1, kGatheredBytes / bytes);
  }
  std::vector<Range> groups;
  for (std::int64_t first = 0; first < sizes.num_kv_heads; first += at_once) {
    groups.push_back({first, std::min(first + at_once, sizes.num_kv_heads)});
  }
  return groups;
}

/// The query heads that read some KV heads.
Range query_heads(const ContextCall& own, const Range& kv_heads) {
  return {kv_heads.begin * own.whole.group(), kv_heads.end * own.whole.group()};
}

/// Keys and values of some KV heads on their way between ranks, and then whole.
class GatheredKeys {
 public:
  GatheredKeys(const ContextCall& own, CollectiveCall& call) : own_(own), call_(call) {}

  /// Ranks are sent only the keys that their queries may see.
  void begin(const Range& heads) {
    heads_ = heads;
    outgoing_.clear();
    incoming_.clear();
    for (int other = 0; other < call_.size(); ++other) {
      outgoing_.emplace_back();
      incoming_.emplace_back();
      if (other == call_.rank()) continue;
      incoming_.back() = layout_of(other, call_.rank()).allocate();
      const MessageLayout layout = layout_of(call_.rank(), other);
      Tensor& message = outgoing_.back() = layout.allocate();
      const auto pack = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
        copy(own_.context, own_k().slice(1, local, local + count),
             layout.array(message, 0).slice(1, first, first + count));
        copy(own_.context, own_v().slice(1, local, local + count),
             layout.array(message, 1).slice(1, first, first + count));
      };
      for_each_own(own_.whole.keys_of(call_.rank()), own_.whole.keys_between(call_.rank(), other),
                   pack);
    }
    begin_exchange(call_, outgoing_, incoming_);
  }

  /// Waits, and puts all tokens together. Keys that this rank's queries may not see are not set.
  void finish() {
    call_.wait();
    const AttentionSizes& sizes = own_.whole.sizes();
    const Context& context = own_.context;
    k_ = Tensor::uninitialized(context, own_.k.dtype(),
                               {sizes.batch, sizes.kv_len, heads_.length(), sizes.head_dim});
    v_ = Tensor::uninitialized(context, own_.v.dtype(),
                               {sizes.batch, sizes.kv_len, heads_.length(), sizes.value_dim});
    for (int other = 0; other < call_.size(); ++other) {
      if (other == call_.rank()) {
        put_tokens(context, own_k(), own_.whole.keys_of(other), 1, k_);
        put_tokens(context, own_v(), own_.whole.keys_of(other), 1, v_);
        continue;
      }
      const MessageLayout layout = layout_of(other, call_.rank());
      const std::vector<TokenRange> keys = own_.whole.keys_between(other, call_.rank());
      put_tokens(context, layout.array(incoming_[index(other)], 0), keys, 1, k_);
      put_tokens(context, layout.array(incoming_[index(other)], 1), keys, 1, v_);
    }
  }

  /// The keys or values of one sequence.
  ConstTensorView k_of(const QueryPiece& piece) const { return sequence(k_, piece); }
  ConstTensorView v_of(const QueryPiece& piece) const { return sequence(v_, piece); }

 private:
  static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
  ConstTensorView own_k() const { return own_.k.slice(2, heads_.begin, heads_.end); }
  ConstTensorView own_v() const { return own_.v.slice(2, heads_.begin, heads_.end); }
  MessageLayout layout_of(int owner, int reader) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    const std::int64_t tokens = total_length(own_.whole.keys_between(owner, reader));
    return MessageLayout(
        {{own_.k.dtype(), {sizes.batch, tokens, heads_.length(), sizes.head_dim}},
         {own_.v.dtype(), {sizes.batch, tokens, heads_.length(), sizes.value_dim}}});
  }
  ConstTensorView sequence(const Tensor& tensor, const QueryPiece& piece) const {
    const TokenRange keys = own_.whole.keys_of_sequence(piece.sequence);
    return tensor.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
  }

  const ContextCall& own_;
  CollectiveCall& call_;
  Range heads_;
  std::vector<Tensor> outgoing_;  // one for each rank; none for this one
  std::vector<Tensor> incoming_;
  Tensor k_;
  Tensor v_;
};

/// Runs body(heads, gathered keys) for all heads in turn; the keys of the next are under way.
template <class Body>
void for_each_group(const ContextCall& own, CollectiveCall& call, const Body& body) {
  const std::vector<Range> groups = head_groups(own);
  GatheredKeys keys[] = {{own, call}, {own, call}};
  if (!groups.empty()) keys[0].begin(groups[0]);
  for (std::size_t i = 0; i < groups.size(); ++i) {
    keys[i % 2].finish();
    if (i + 1 < groups.size()) keys[(i + 1) % 2].begin(groups[i + 1]);
    body(groups[i], keys[i % 2]);
  }
}

/// This rank's terms of dk and dv for some KV heads, over all keys; then their sums over ranks for
/// its own keys.
class KeyGradients {
 public:
  KeyGradients(const ContextCall& own, const Range& heads) : own_(own), heads_(heads) {
    if (!own.wanted.dk.absent()) dk_ = zeros(own.k);
    if (!own.wanted.dv.absent()) dv_ = zeros(own.v);
  }

  bool wanted() const { return dk_.rank() != 0 || dv_.rank() != 0; }

  /// Memory for the terms of one piece: add_views(), attend_backward(), add().
  void add_views(const QueryPiece& piece, AttentionGradients& gradients) {
    piece_dk_ = piece_of(dk_, piece);
    piece_dv_ = piece_of(dv_, piece);
    gradients.dk = present(piece_dk_);
    gradients.dv = present(piece_dv_);
  }
  void add(const QueryPiece& piece) {
    if (dk_.rank() != 0) add_to(own_.context, piece_dk_, rows(dk_, piece));
    if (dv_.rank() != 0) add_to(own_.context, piece_dv_, rows(dv_, piece));
  }

  /// Each rank has terms for the keys that its queries may see; the others' are 0.
  void reduce(CollectiveCall& call, ContextGradients& gradients) {
    const auto index = [](int rank) { return static_cast<std::size_t>(rank); };
    std::vector<Tensor> outgoing, incoming;
    for (int other = 0; other < call.size(); ++other) {
      const MessageLayout layout = layout_of(other, call.rank());
      Tensor& message = outgoing.emplace_back(layout.allocate());
      const std::vector<TokenRange> keys = own_.whole.keys_between(other, call.rank());
      std::size_t array = 0;
      for (const Tensor* terms : {&dk_, &dv_}) {
        if (terms->rank() == 0) continue;
        take_tokens(own_.context, *terms, keys, 1, layout.array(message, array++));
      }
      incoming.push_back(layout_of(call.rank(), other).allocate());
    }
    begin_exchange(call, outgoing, incoming);
    call.wait();
    std::size_t array = 0;
    for (Tensor* result : {&gradients.dk, &gradients.dv}) {
      if (result->rank() == 0) continue;
      const TensorView target = result->view().slice(2, heads_.begin, heads_.end);
      const Dims& shape = target.shape();
      Tensor arrived(compute_dtype(own_.k.dtype()),
                     {call.size(), shape[0], shape[1], shape[2], shape[3]});
      for (int other = 0; other < call.size(); ++other) {
        const TensorView part = layout_of(call.rank(), other).array(incoming[index(other)], array);
        const auto unpack = [&](std::int64_t local, std::int64_t first, std::int64_t count) {
          copy(own_.context, part.slice(1, first, first + count),
               arrived.view().select(0, other).slice(1, local, local + count));
        };
        for_each_own(own_.whole.keys_of(call.rank()), own_.whole.keys_between(call.rank(), other),
                     unpack);
      }
      const Tensor sum = sum_in_order(own_.context, arrived);
      copy(own_.context, sum, target);
      own_.context.synchronize();
      ++array;
    }
  }

 private:
  Tensor zeros(const ConstTensorView& like) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    return {own_.context,
            compute_dtype(like.dtype()),
            {sizes.batch, sizes.kv_len, heads_.length(), like.size(3)}};
  }
  TensorView rows(Tensor& sums, const QueryPiece& piece) const {
    const TokenRange keys = own_.whole.keys_of_sequence(piece.sequence);
    return sums.view().slice(0, piece.batch, piece.batch + 1).slice(1, keys.begin, keys.end);
  }
  Tensor piece_of(Tensor& sums, const QueryPiece& piece) const {
    if (sums.rank() == 0) return {};
    return Tensor::uninitialized(own_.context, sums.dtype(), rows(sums, piece).shape());
  }
  MessageLayout layout_of(int owner, int reader) const {
    const std::int64_t tokens = total_length(own_.whole.keys_between(owner, reader));
    std::vector<MessageLayout::Array> arrays;
    for (const Tensor* sums : {&dk_, &dv_}) {
      if (sums->rank() == 0) continue;
      arrays.push_back({sums->dtype(), {sums->size(0), tokens, sums->size(2), sums->size(3)}});
    }
    return MessageLayout(std::move(arrays));
  }

  const ContextCall& own_;
  Range heads_;
  Tensor dk_;
  Tensor dv_;
  Tensor piece_dk_;
  Tensor piece_dv_;
};

}  // namespace

void attend_gathered(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  const std::vector<QueryPiece> pieces = own.whole.pieces_of(own.whole.queries_of(call.rank()));
  for_each_group(own, call, [&](const Range& group, const GatheredKeys& keys) {
    const Range heads = query_heads(own, group);
    for (const QueryPiece& piece : pieces) {
      attend(own.context, rows_of(own.q, piece, heads), keys.k_of(piece), keys.v_of(piece),
             own.whole.options_of(piece, heads), rows_of(results.out.view(), piece, heads),
             lse_of(present(results.lse), piece, heads), own.whole.whole_of(piece));
      call.poll();
    }
    own.context.synchronize();
  });
}

void attend_gathered_backward(const ContextCall& own, CollectiveCall& call,
                              ContextGradients& gradients) {
  const std::vector<QueryPiece> pieces = own.whole.pieces_of(own.whole.queries_of(call.rank()));
  for_each_group(own, call, [&](const Range& group, const GatheredKeys& keys) {
    const Range heads = query_heads(own, group);
    KeyGradients of_keys(own, group);
    for (const QueryPiece& piece : pieces) {
      const AttentionOptions options = own.whole.options_of(piece, heads);
      SideGradients of_options(own, options);
      AttentionGradients views{.dq = rows_of(present(gradients.dq), piece, heads)};
      of_keys.add_views(piece, views);
      of_options.add_views(views);
      attend_backward(own.context, rows_of(own.q, piece, heads), keys.k_of(piece), keys.v_of(piece),
                      options,
                      {.out = rows_of(own.saved.out, piece, heads),
                       .lse = lse_of(own.saved.lse, piece, heads),
                       .dout = rows_of(own.saved.dout, piece, heads),
                       .dlse = lse_of(own.saved.dlse, piece, heads)},
                      views);
      of_keys.add(piece);
      of_options.add(piece, heads, gradients);
      call.poll();
      own.context.synchronize();
    }
    call.wait();  // for the next keys: one step at a time
    if (of_keys.wanted()) of_keys.reduce(call, gradients);
  });
}

}  // namespace ladon
