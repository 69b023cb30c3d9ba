// Context-parallel attention in a ring: each rank attends with its queries over one rank's keys
// while those of the next are under way, and passes them on. Partial results are merged as blocks
// come round: rank r sees the blocks r, r - 1, r - 2, ..., so the order, and with it every bit, is
// fixed for a number of ranks. In backward the sums of dk and dv follow their keys round the ring,
// one hop more, and so come home.

#include <algorithm>
#include <array>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"
#include "parallel/message_layout.h"

namespace ladon {
namespace {

/// Keys of one sequence that come together in a block.
struct KeyRun {
  std::int64_t sequence = 0;
  std::int64_t batch = 0;
  std::int64_t local = 0;  // the first one among the block's tokens
  std::int64_t first = 0;  // and in its sequence
  std::int64_t length = 0;
};

/// What goes round: two arrays for the tokens of one rank.
class Ring {
 public:
  Ring(const ContextCall& own, CollectiveCall& call) : own_(own), call_(call) {}

  int block_at(int step) const { return (call_.rank() + call_.size() - step) % call_.size(); }

  /// Keys and values of a rank, or sums of their gradients.
  MessageLayout layout_of(int rank, DType dtype) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    const std::int64_t tokens = total_length(own_.whole.keys_of(rank));
    return MessageLayout({{dtype, {sizes.batch, tokens, sizes.num_kv_heads, sizes.head_dim}},
                          {dtype, {sizes.batch, tokens, sizes.num_kv_heads, sizes.value_dim}}});
  }

  /// Sends a message to the next rank while the previous one's arrives.
  void begin(const Tensor& outgoing, Tensor& incoming) {
    const int ranks = call_.size();
    const Send send{(call_.rank() + 1) % ranks, host_bytes(outgoing)};
    const Receive receive{(call_.rank() + ranks - 1) % ranks, host_bytes(incoming.view())};
    call_.begin(std::span(&send, send.data.empty() ? 0 : 1),
                std::span(&receive, receive.data.empty() ? 0 : 1));
  }

  std::vector<KeyRun> runs_of(int rank) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    std::vector<KeyRun> runs;
    for_each_range(own_.whole.keys_of(rank), [&](const TokenRange& range, std::int64_t local) {
      for (std::int64_t s = 0; s < sizes.num_sequences; ++s) {
        const TokenRange keys = own_.whole.keys_of_sequence(s);
        const std::int64_t begin = std::max(range.begin, keys.begin);
        const std::int64_t end = std::min(range.end, keys.end);
        if (begin >= end) continue;
        runs.push_back({.sequence = s,
                        .batch = sizes.packed ? 0 : s,
                        .local = local + begin - range.begin,
                        .first = begin - keys.begin,
                        .length = end - begin});
      }
    });
    return runs;
  }

  /// The options of attention of one piece over one run, without sinks.
  AttentionOptions options_of(const QueryPiece& piece, const KeyRun& run) const {
    AttentionOptions options = own_.whole.options_of(piece, all_heads());
    options.position_offset = *options.position_offset - run.first;
    options.dropout.first_key += run.first;
    options.sinks = {};
    for (ConstTensorView* view : {&options.mask, &options.bias}) {
      *view = slice_unless_one(*view, 3, {run.first, run.first + run.length});
    }
    return options;
  }
  /// False where no query of the piece may see any key of the run by causal and window.
  static bool is_seen(const QueryPiece& piece, const KeyRun& run, const AttentionOptions& options) {
    if (piece.sequence != run.sequence) return false;
    const std::int64_t first = *options.position_offset;
    const std::int64_t last = first + piece.length - 1;
    if (options.causal && last < 0) return false;
    // Limits beyond any length are as good as none.
    const std::int64_t left = std::min(options.window_left.value_or(kNoWindow), kNoWindow);
    const std::int64_t right = std::min(options.window_right.value_or(kNoWindow), kNoWindow);
    return first - left < run.length && (options.causal || last + right >= 0);
  }
  Range all_heads() const { return {0, own_.whole.sizes().num_heads}; }

  /// A run's rows of keys, values or their gradients.
  template <class View>
  static View rows_of(const View& block, const KeyRun& run) {
    return block.slice(0, run.batch, run.batch + 1).slice(1, run.local, run.local + run.length);
  }

 private:
  const ContextCall& own_;
  CollectiveCall& call_;
};

/// Keys and values on their way: the block that is computed with, and the next one.
class RingKeys {
 public:
  RingKeys(const ContextCall& own, CollectiveCall& call, Ring& ring)
      : own_(own), call_(call), ring_(ring) {
    const MessageLayout layout = layout_at(0);
    message_ = layout.allocate();
    copy(own.context, own.k, layout.array(message_, 0));
    copy(own.context, own.v, layout.array(message_, 1));
  }

  /// Begins to pass the block of this step on, and gives its keys and values.
  std::array<ConstTensorView, 2> begin(int step) {
    const MessageLayout layout = layout_at(step);
    if (step + 1 < call_.size()) {
      next_ = layout_at(step + 1).allocate();
      ring_.begin(message_, next_);
    }
    std::array<ConstTensorView, 2> views{layout.array(message_, 0), layout.array(message_, 1)};
    if (own_.context.device() == DeviceId()) return views;
    for (std::size_t i = 0; i < 2; ++i) {
      there_[i] = Tensor::uninitialized(own_.context, views[i].dtype(), views[i].shape());
      copy(own_.context, views[i], there_[i]);
      views[i] = there_[i];
    }
    return views;
  }
  void finish() {
    call_.wait();
    own_.context.synchronize();
    std::swap(message_, next_);
  }

 private:
  MessageLayout layout_at(int step) const {
    return ring_.layout_of(ring_.block_at(step), own_.k.dtype());
  }

  const ContextCall& own_;
  CollectiveCall& call_;
  Ring& ring_;
  Tensor message_;
  Tensor next_;
  std::array<Tensor, 2> there_;  // on a device
};

/// The result of one piece so far.
class PieceSum {
 public:
  PieceSum(const Context& context, DType dtype, const Dims& out_shape, const Dims& lse_shape)
      : context_(context) {
    for (Result& result : results_) {
      result.out = Tensor::uninitialized(context, dtype, out_shape);
      result.lse = Tensor::uninitialized(context, DType::kF64, lse_shape);
    }
  }

  /// Where the next part is to be written; then add() it.
  TensorView part_out() { return results_[is_empty_ ? 0 : 1].out; }
  TensorView part_lse() { return results_[is_empty_ ? 0 : 1].lse; }
  void add() {
    if (!is_empty_) {
      const ConstTensorView outs[] = {results_[0].out, results_[1].out};
      const ConstTensorView lses[] = {results_[0].lse, results_[1].lse};
      merge_attention(context_, outs, lses, results_[2].out, results_[2].lse);
      std::swap(results_[0], results_[2]);
    }
    is_empty_ = false;
  }
  bool is_empty() const { return is_empty_; }

  void finish(const ConstTensorView& sinks, const TensorView& out, const TensorView& lse) const {
    const ConstTensorView outs[] = {results_[0].out};
    const ConstTensorView lses[] = {results_[0].lse};
    merge_attention(context_, outs, lses, out, lse, sinks);
  }

 private:
  struct Result {
    Tensor out;
    Tensor lse;
  };

  const Context& context_;
  std::array<Result, 3> results_;  // the sum, a part, and their merger
  bool is_empty_ = true;
};

}  // namespace

void attend_ring(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  Ring ring(own, call);
  const AttentionSizes& sizes = own.whole.sizes();
  const std::vector<QueryPiece> pieces = own.whole.pieces_of(own.whole.queries_of(call.rank()));
  std::vector<PieceSum> sums;
  sums.reserve(pieces.size());
  for (const QueryPiece& piece : pieces) {
    sums.emplace_back(own.context, compute_dtype(own.q.dtype()),
                      Dims{1, piece.length, sizes.num_heads, sizes.value_dim},
                      Dims{1, sizes.num_heads, piece.length});
  }
  RingKeys keys(own, call, ring);
  const auto attend_run = [&](std::size_t i, const KeyRun& run, const ConstTensorView& k,
                              const ConstTensorView& v, const AttentionOptions& options) {
    attend(own.context, rows_of(own.q, pieces[i], ring.all_heads()), Ring::rows_of(k, run),
           Ring::rows_of(v, run), options, sums[i].part_out(), sums[i].part_lse());
    sums[i].add();
  };
  for (int step = 0; step < call.size(); ++step) {
    const auto [k, v] = keys.begin(step);
    for (const KeyRun& run : ring.runs_of(ring.block_at(step))) {
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const AttentionOptions options = ring.options_of(pieces[i], run);
        if (Ring::is_seen(pieces[i], run, options)) attend_run(i, run, k, v, options);
        call.poll();
      }
    }
    keys.finish();
  }
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    if (sums[i].is_empty()) {  // attention over no keys at all
      const KeyRun none{.sequence = pieces[i].sequence, .batch = pieces[i].batch};
      AttentionOptions options = ring.options_of(pieces[i], none);
      attend_run(i, none, own.k, own.v, options);
    }
    sums[i].finish(own.whole.options().sinks,
                   rows_of(results.out.view(), pieces[i], ring.all_heads()),
                   lse_of(present(results.lse), pieces[i], ring.all_heads()));
  }
  own.context.synchronize();
}

void attend_ring_backward(const ContextCall& own, CollectiveCall& call,
                          ContextGradients& gradients) {
  Ring ring(own, call);
  const Context& context = own.context;
  const DType sum_dtype = compute_dtype(own.k.dtype());
  const bool wants_keys = gradients.dk.rank() != 0 || gradients.dv.rank() != 0;
  const std::vector<QueryPiece> pieces = own.whole.pieces_of(own.whole.queries_of(call.rank()));
  const Range heads = ring.all_heads();
  const auto saved_of = [&](const QueryPiece& piece) {
    return AttentionSaved{.out = rows_of(own.saved.out, piece, heads),
                          .lse = lse_of(own.saved.lse, piece, heads),
                          .dout = rows_of(own.saved.dout, piece, heads),
                          .dlse = lse_of(own.saved.dlse, piece, heads)};
  };
  Tensor dq;
  if (gradients.dq.rank() != 0) dq = Tensor(context, compute_dtype(own.q.dtype()), own.q.shape());
  RingKeys keys(own, call, ring);
  Tensor travelling;  // the sums of the block of this step, from the ranks before
  for (int step = 0; step < call.size(); ++step) {
    const auto [k, v] = keys.begin(step);
    const int block = ring.block_at(step);
    Tensor dk, dv;
    if (wants_keys) {
      dk = Tensor(context, sum_dtype, k.shape());
      dv = Tensor(context, sum_dtype, v.shape());
    }
    for (const KeyRun& run : ring.runs_of(block)) {
      for (const QueryPiece& piece : pieces) {
        const AttentionOptions options = ring.options_of(piece, run);
        if (!Ring::is_seen(piece, run, options)) continue;
        SideGradients of_options(own, options);
        const ConstTensorView q = rows_of(own.q, piece, heads);
        Tensor piece_dq, piece_dk, piece_dv;
        AttentionGradients views;
        if (dq.rank() != 0) {
          piece_dq = Tensor::uninitialized(context, dq.dtype(), q.shape());
          views.dq = piece_dq;
        }
        if (wants_keys) {
          piece_dk = Tensor::uninitialized(context, sum_dtype, Ring::rows_of(k, run).shape());
          piece_dv = Tensor::uninitialized(context, sum_dtype, Ring::rows_of(v, run).shape());
          views.dk = piece_dk;
          views.dv = piece_dv;
        }
        of_options.add_views(views);
        attend_backward(context, q, Ring::rows_of(k, run), Ring::rows_of(v, run), options,
                        saved_of(piece), views);
        if (dq.rank() != 0) add_to(context, piece_dq, rows_of(dq.view(), piece, heads));
        if (wants_keys) {
          add_to(context, piece_dk, Ring::rows_of(dk.view(), run));
          add_to(context, piece_dv, Ring::rows_of(dv.view(), run));
        }
        of_options.add(piece, heads, gradients, run.first);
        call.poll();
        context.synchronize();
      }
    }
    keys.finish();
    if (!wants_keys) continue;
    const MessageLayout layout = ring.layout_of(block, sum_dtype);
    const auto add_arrived = [&](Tensor& own_terms, std::size_t index) {
      Tensor sum = Tensor::uninitialized(context, sum_dtype, own_terms.shape());
      copy(context, layout.array(travelling, index), sum);
      add_to(context, own_terms, sum);  // the terms of the ranks before come first
      context.synchronize();
      own_terms = std::move(sum);
    };
    if (step > 0) {
      add_arrived(dk, 0);
      add_arrived(dv, 1);
    }
    Tensor outgoing = layout.allocate();
    copy(context, dk, layout.array(outgoing, 0));
    copy(context, dv, layout.array(outgoing, 1));
    if (call.size() == 1) {
      travelling = std::move(outgoing);
      continue;
    }
    travelling = ring.layout_of(ring.block_at(step + 1), sum_dtype).allocate();
    ring.begin(outgoing, travelling);
    call.wait();
  }
  if (gradients.dq.rank() != 0) copy(context, dq, gradients.dq);
  const MessageLayout home = ring.layout_of(call.rank(), sum_dtype);
  if (gradients.dk.rank() != 0) copy(context, home.array(travelling, 0), gradients.dk);
  if (gradients.dv.rank() != 0) copy(context, home.array(travelling, 1), gradients.dv);
  if (gradients.dsinks.rank() != 0) {
    // A sink's gradient needs no keys: out and lse are those of all of them.
    for (const QueryPiece& piece : pieces) {
      const KeyRun none{.sequence = piece.sequence, .batch = piece.batch};
      AttentionOptions options = ring.options_of(piece, none);
      options.sinks = own.whole.options().sinks;
      Tensor dsinks =
          Tensor::uninitialized(context, gradients.dsinks.dtype(), options.sinks.shape());
      attend_backward(context, rows_of(own.q, piece, heads), Ring::rows_of(own.k, none),
                      Ring::rows_of(own.v, none), options, saved_of(piece), {.dsinks = dsinks});
      add_to(context, dsinks, gradients.dsinks);
    }
  }
  context.synchronize();
}

}  // namespace ladon
