// Partial results over a SpreadKvCache between ranks: from all ranks to the one that merges a head,
// and what was merged to all.

#include <algorithm>
#include <utility>

#include "core/compute_dtype.h"
#include "ladon/attention.h"
#include "parallel/host_messages.h"
#include "parallel/message_layout.h"
#include "parallel/spread_call.h"

namespace ladon {

void merge_parts(const Context& context, std::span<const SpreadPart> parts, const TensorView& out,
                 const TensorView& lse, const ConstTensorView& sinks) {
  std::vector<ConstTensorView> outs, lses;
  for (const SpreadPart& part : parts) {
    outs.emplace_back(part.out);
    lses.emplace_back(part.lse);
  }
  merge_attention(context, outs, lses, out, lse, sinks);
}

/// Sends the partial results of all heads to the ranks that merge them; returns what this rank has
/// merged, the rows of all pieces. Parts of a piece are merged in the order of their splits, or of
/// the ranks.
SpreadCall::Part SpreadCall::exchange(CollectiveCall& call, const std::vector<Piece>& pieces,
                                      const std::vector<std::vector<Part>>& parts,
                                      bool reproducible, const AttentionOptions& options) {
  const int ranks = call.size();
  const auto count_of = [&](const Piece& piece, int rank) {
    const std::int64_t own = (num_splits(piece) + ranks - 1 - rank) / ranks;
    return reproducible ? own : std::min<std::int64_t>(own, 1);
  };
  const auto heads_of = [&](int rank) { return share_of(sizes_.num_heads, rank, ranks); };
  // Out and lse of each part, one after the other.
  const auto layout_of = [&](int from, int to) {
    std::vector<MessageLayout::Array> arrays;
    const std::int64_t heads = heads_of(to).length();
    for (const Piece& piece : pieces) {
      for (std::int64_t i = 0; i < count_of(piece, from); ++i) {
        arrays.push_back({compute_dtype(dtype_), {1, piece.length, heads, sizes_.value_dim}});
        arrays.push_back({DType::kF64, {1, heads, piece.length}});
      }
    }
    return MessageLayout(std::move(arrays));
  };
  std::vector<Tensor> outgoing, incoming;
  std::vector<MessageLayout> layouts;  // of incoming: long sequences have many parts
  for (int other = 0; other < ranks; ++other) {
    const MessageLayout layout = layout_of(call.rank(), other);
    Tensor& message = outgoing.emplace_back(layout.allocate());
    const Range heads = heads_of(other);
    std::size_t array = 0;
    for (const std::vector<Part>& of_piece : parts) {
      for (const Part& part : of_piece) {
        copy(context_, part.out.view().slice(2, heads.begin, heads.end),
             layout.array(message, array++));
        copy(context_, part.lse.view().slice(1, heads.begin, heads.end),
             layout.array(message, array++));
      }
    }
    layouts.push_back(layout_of(other, call.rank()));
    incoming.push_back(layouts.back().allocate());
  }
  begin_exchange(call, outgoing, incoming);
  call.wait();

  const Range own = heads_of(call.rank());
  std::int64_t rows = 0;
  for (const Piece& piece : pieces) rows += piece.length;
  Part merged{Tensor::uninitialized(context_, dtype_, {1, rows, own.length(), sizes_.value_dim}),
              {}};
  if (lse_.rank() != 0) {
    merged.lse = Tensor::uninitialized(context_, lse_.dtype(), {1, own.length(), rows});
  }
  std::vector<std::size_t> next(static_cast<std::size_t>(ranks));
  std::int64_t row = 0;
  for (const Piece& piece : pieces) {
    if (own.length() == 0) break;
    // Split s is the (s / ranks)-th of rank s % ranks.
    const std::int64_t most = reproducible ? num_splits(piece) : ranks;
    std::vector<Part> arrived;
    for (std::int64_t i = 0; i < most; ++i) {
      const int rank = static_cast<int>(i % ranks);
      if (i / ranks >= count_of(piece, rank)) continue;
      const auto index = static_cast<std::size_t>(rank);
      const auto next_array = [&] { return layouts[index].array(incoming[index], next[index]++); };
      Part& part = arrived.emplace_back();
      part.out = on_device(context_, next_array());
      part.lse = on_device(context_, next_array());
    }
    const std::int64_t end = row + piece.length;
    ConstTensorView sinks;
    if (!options.sinks.absent() && !only_split(piece.sequence, options)) {
      sinks = options.sinks.slice(0, own.begin, own.end);
    }
    merge_parts(context_, arrived, merged.out.view().slice(1, row, end),
                lse_.rank() == 0 ? TensorView() : merged.lse.view().slice(2, row, end), sinks);
    context_.synchronize();  // before the parts are freed
    row = end;
  }
  return merged;
}

/// Copies the rows of some pieces, one after the other, to their places among all.
void SpreadCall::put_rows(const std::vector<Piece>& pieces, int query_dim,
                          const ConstTensorView& rows, const TensorView& all) const {
  std::int64_t row = 0;
  for (const Piece& piece : pieces) {
    copy(context_, rows.slice(query_dim, row, row + piece.length), rows_of(all, query_dim, piece));
    row += piece.length;
  }
}

/// The merged heads of all ranks, into the results.
void SpreadCall::gather_heads(CollectiveCall& call, const std::vector<Piece>& pieces,
                              const Part& merged) {
  const std::int64_t rows = merged.out.size(1);
  const auto layout_of = [&](int rank) {
    const std::int64_t heads = share_of(sizes_.num_heads, rank, call.size()).length();
    std::vector<MessageLayout::Array> arrays{{dtype_, {1, rows, heads, sizes_.value_dim}}};
    if (lse_.rank() != 0) arrays.push_back({lse_.dtype(), {1, heads, rows}});
    return MessageLayout(std::move(arrays));
  };
  const MessageLayout sent = layout_of(call.rank());
  Tensor message = sent.allocate();
  copy(context_, merged.out, sent.array(message, 0));
  if (lse_.rank() != 0) copy(context_, merged.lse, sent.array(message, 1));
  std::vector<Tensor> incoming;
  incoming.reserve(static_cast<std::size_t>(call.size()));
  for (int other = 0; other < call.size(); ++other) {
    incoming.push_back(layout_of(other).allocate());
  }
  gather_bytes(call, host_bytes(std::as_const(message)), [&](int other) {
    return host_bytes(incoming[static_cast<std::size_t>(other)].view());
  });
  for (int other = 0; other < call.size(); ++other) {
    const Range heads = share_of(sizes_.num_heads, other, call.size());
    const MessageLayout layout = layout_of(other);
    Tensor& arrived = incoming[static_cast<std::size_t>(other)];
    put_rows(pieces, 1, layout.array(arrived, 0), out_.view().slice(2, heads.begin, heads.end));
    if (lse_.rank() == 0) continue;
    put_rows(pieces, 2, layout.array(arrived, 1), lse_.view().slice(1, heads.begin, heads.end));
  }
  context_.synchronize();
}

}  // namespace ladon
