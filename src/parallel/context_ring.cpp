// Context-parallel attention in a ring: each rank attends with its queries over one rank's keys
// while those of the next are under way, and passes them on. Partial results are merged as blocks
// come round: rank r sees the blocks r, r - 1, r - 2, ..., so the order, and with it every bit, is
// fixed for a number of ranks. In backward the sums of dk and dv follow their keys round the ring,
// one step behind them, and so come home. A rank computes with its own keys twice, with half of its
// queries each time: first, while the next keys come, and last, while the sums come home.

#include <algorithm>
#include <array>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "parallel/array_exchange.h"
#include "parallel/context_schemes.h"
#include "parallel/host_messages.h"

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

/// Whose keys a rank has at which step, and what it computes with them.
class Ring {
 public:
  Ring(const ContextCall& own, const CollectiveCall& call)
      : own_(own), rank_(call.rank()), ranks_(call.size()) {}

  const ContextCall& own() const { return own_; }
  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int next() const { return (rank_ + 1) % ranks_; }
  int previous() const { return block_at(1); }
  /// A rank's own block comes again after the last one.
  int block_at(int step) const { return (rank_ + 2 * ranks_ - step) % ranks_; }

  /// Keys and values of a rank, or sums of their gradients.
  ExchangePart::Arrays arrays_of(int rank, DType dtype) const {
    const AttentionSizes& sizes = own_.whole.sizes();
    const std::int64_t tokens = total_length(own_.whole.keys_of(rank));
    return {{dtype, {sizes.batch, tokens, sizes.num_kv_heads, sizes.head_dim}},
            {dtype, {sizes.batch, tokens, sizes.num_kv_heads, sizes.value_dim}}};
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

  /// The queries of a step of backward: half of each piece with a rank's own keys.
  std::vector<QueryPiece> pieces_at(int step, std::vector<QueryPiece> pieces) const {
    for (QueryPiece& piece : pieces) {
      const std::int64_t half = piece.length / 2;
      const std::int64_t begin = step == ranks_ ? half : 0;
      const std::int64_t end = step == 0 ? half : piece.length;
      piece.local += begin;
      piece.first += begin;
      piece.length = end - begin;
    }
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(),
                                [](const QueryPiece& piece) { return piece.length == 0; }),
                 pieces.end());
    return pieces;
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
  const int rank_;
  const int ranks_;
};

/// Two arrays that go to the next rank while those of the previous one come.
class RingPart : public ExchangePart {
 public:
  RingPart(const Ring& ring, DType dtype) : ring_(ring), dtype_(dtype) {}

  Arrays outgoing(int other) const override {
    return other == ring_.next() ? ring_.arrays_of(leaving_, dtype_) : Arrays();
  }
  Arrays incoming(int other) const override {
    return other == ring_.previous() ? ring_.arrays_of(coming_, dtype_) : Arrays();
  }
  void unpack(int /*other*/, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < 2; ++i) {
      here_[i] = {};  // before there is memory for both
      here_[i] = on_device(ring_.own().context, arrays[i]);
    }
    ring_.own().context.synchronize();
  }

 protected:
  const Ring& ring_;
  const DType dtype_;
  // Whose block they are.
  int leaving_ = 0;
  int coming_ = 0;
  std::array<Tensor, 2> here_;
};

class RingKeys final : public RingPart {
 public:
  explicit RingKeys(const Ring& ring) : RingPart(ring, ring.own().k.dtype()) {}

  /// Of step + 1, while step computes with keys() and values(); null where no more come.
  ExchangePart* of_next(int step) {
    leaving_ = ring_.block_at(step);
    coming_ = ring_.block_at(step + 1);
    return step + 1 < ring_.ranks() ? this : nullptr;
  }
  ConstTensorView keys() const { return is_own() ? ring_.own().k : here_[0].view(); }
  ConstTensorView values() const { return is_own() ? ring_.own().v : here_[1].view(); }

  void pack(int /*other*/, std::span<const TensorView> arrays) override {
    copy(ring_.own().context, keys(), arrays[0]);
    copy(ring_.own().context, values(), arrays[1]);
  }

 private:
  bool is_own() const { return leaving_ == ring_.rank(); }
};

/// The sums of dk and dv of a block over the ranks that it has been to.
class RingSums final : public RingPart {
 public:
  RingSums(const Ring& ring, DType dtype, bool wanted) : RingPart(ring, dtype), wanted_(wanted) {}

  bool wanted() const { return wanted_; }
  DType dtype() const { return dtype_; }

  /// The sums of the block of this step, from the rank before; null where there are none.
  ExchangePart* of(int step) {
    if (!wanted_) return nullptr;
    leaving_ = ring_.block_at(step - 1);
    coming_ = ring_.block_at(step);
    const Context& context = ring_.own().context;
    const Arrays arrays = ring_.arrays_of(coming_, dtype_);
    for (std::size_t i = 0; i < 2; ++i) terms_[i] = Tensor(context, dtype_, arrays[i].shape);
    return step > 0 ? this : nullptr;
  }
  void pack(int /*other*/, std::span<const TensorView> arrays) override {
    for (std::size_t i = 0; i < 2; ++i) copy(ring_.own().context, here_[i], arrays[i]);
  }

  /// This rank's terms of the step.
  TensorView terms(std::size_t i) { return terms_[i]; }
  /// When the sums of the ranks before have come: their terms come first.
  void add_terms() {
    for (std::size_t i = 0; i < 2 && wanted_; ++i) {
      if (here_[i].rank() == 0) {
        here_[i] = std::move(terms_[i]);
      } else {
        add_to(ring_.own().context, terms_[i], here_[i]);
      }
    }
    ring_.own().context.synchronize();
  }
  const Tensor& sum(std::size_t i) const { return here_[i]; }

 private:
  const bool wanted_;
  std::array<Tensor, 2> terms_;
};

/// The result of one piece so far: a few parts, which are merged when there are kRingParts.
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
  TensorView part_out() { return results_[count_].out; }
  TensorView part_lse() { return results_[count_].lse; }
  void add() {
    if (++count_ < kParts) return;
    merge(results_[kParts].out, results_[kParts].lse, {});
    std::swap(results_[0], results_[kParts]);
    count_ = 1;
  }
  bool is_empty() const { return count_ == 0; }

  void finish(const ConstTensorView& sinks, const TensorView& out, const TensorView& lse) const {
    merge(out, lse, sinks);
  }

 private:
  struct Result {
    Tensor out;
    Tensor lse;
  };
  static constexpr auto kParts = static_cast<std::size_t>(kRingParts);

  void merge(const TensorView& out, const TensorView& lse, const ConstTensorView& sinks) const {
    std::vector<ConstTensorView> outs, lses;
    for (const Result& result : std::span(results_).first(count_)) {
      outs.emplace_back(result.out);
      lses.emplace_back(result.lse);
    }
    merge_attention(context_, outs, lses, out, lse, sinks);
  }

  const Context& context_;
  std::array<Result, kParts + 1> results_;  // parts in their order, and what they are merged into
  std::size_t count_ = 0;
};

}  // namespace

void attend_ring(const ContextCall& own, CollectiveCall& call, ContextResults& results) {
  const Ring ring(own, call);
  const AttentionSizes& sizes = own.whole.sizes();
  const std::vector<QueryPiece> pieces = own.whole.pieces_of(own.whole.queries_of(call.rank()));
  std::vector<PieceSum> sums;
  sums.reserve(pieces.size());
  for (const QueryPiece& piece : pieces) {
    sums.emplace_back(own.context, compute_dtype(own.q.dtype()),
                      Dims{1, piece.length, sizes.num_heads, sizes.value_dim},
                      Dims{1, sizes.num_heads, piece.length});
  }
  RingKeys keys(ring);
  ArrayExchange exchange(call);
  const auto attend_run = [&](std::size_t i, const KeyRun& run, const ConstTensorView& k,
                              const ConstTensorView& v, const AttentionOptions& options) {
    attend(own.context, rows_of(own.q, pieces[i], ring.all_heads()), Ring::rows_of(k, run),
           Ring::rows_of(v, run), options, sums[i].part_out(), sums[i].part_lse());
    sums[i].add();
  };
  for (int step = 0; step < call.size(); ++step) {
    exchange.begin({keys.of_next(step)});
    for (const KeyRun& run : ring.runs_of(ring.block_at(step))) {
      for (std::size_t i = 0; i < pieces.size(); ++i) {
        const AttentionOptions options = ring.options_of(pieces[i], run);
        if (!Ring::is_seen(pieces[i], run, options)) continue;
        attend_run(i, run, keys.keys(), keys.values(), options);
      }
    }
    own.context.synchronize();
    exchange.finish();
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
  const Ring ring(own, call);
  const Context& context = own.context;
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
  RingKeys keys(ring);
  RingSums sums(ring, compute_dtype(own.k.dtype()),
                gradients.dk.rank() != 0 || gradients.dv.rank() != 0);
  ArrayExchange exchange(call);
  for (int step = 0; step <= ring.ranks(); ++step) {
    exchange.begin({keys.of_next(step), sums.of(step)});
    for (const KeyRun& run : ring.runs_of(ring.block_at(step))) {
      const ConstTensorView k = Ring::rows_of(keys.keys(), run);
      const ConstTensorView v = Ring::rows_of(keys.values(), run);
      for (const QueryPiece& piece : ring.pieces_at(step, pieces)) {
        const AttentionOptions options = ring.options_of(piece, run);
        if (!Ring::is_seen(piece, run, options)) continue;
        SideGradients of_options(own, options);
        const ConstTensorView q = rows_of(own.q, piece, heads);
        AttentionGradients views;
        of_options.add_views(views);
        Tensor piece_dq, piece_dk, piece_dv;
        const auto want = [&](bool wanted, DType dtype, const Dims& shape, Tensor& term,
                              TensorView& view) {
          if (!wanted) return;
          term = Tensor::uninitialized(context, dtype, shape);
          view = term;
        };
        want(dq.rank() != 0, dq.dtype(), q.shape(), piece_dq, views.dq);
        want(sums.wanted(), sums.dtype(), k.shape(), piece_dk, views.dk);
        want(sums.wanted(), sums.dtype(), v.shape(), piece_dv, views.dv);
        attend_backward(context, q, k, v, options, saved_of(piece), views);
        if (dq.rank() != 0) add_to(context, piece_dq, rows_of(dq.view(), piece, heads));
        if (sums.wanted()) {
          add_to(context, piece_dk, Ring::rows_of(sums.terms(0), run));
          add_to(context, piece_dv, Ring::rows_of(sums.terms(1), run));
        }
        of_options.add(piece, heads, gradients, run.first);
        context.synchronize();
      }
    }
    exchange.finish();
    sums.add_terms();
  }
  if (gradients.dq.rank() != 0) copy(context, dq, gradients.dq);
  if (gradients.dk.rank() != 0) copy(context, sums.sum(0), gradients.dk);
  if (gradients.dv.rank() != 0) copy(context, sums.sum(1), gradients.dv);
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
      context.synchronize();
    }
  }
  context.synchronize();
}

}  // namespace ladon
