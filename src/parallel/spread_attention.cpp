// Attention over a SpreadKvCache. Every rank attends with all queries over each of its own splits;
// of each head one rank receives the partial results and merges them (spread_exchange.cpp), and
// then ranks exchange what they have merged.

#include <algorithm>
#include <utility>

#include "attention/attend.h"
#include "core/compute_dtype.h"
#include "core/fail.h"
#include "ladon/attention.h"
#include "parallel/spread_call.h"
#include "parallel/whole_attention.h"

namespace ladon {
namespace {

constexpr std::int64_t kSplit = SpreadKvCache::kSplitKeys;
constexpr std::int64_t kPartialBytes = std::int64_t{64} << 20;

}  // namespace

void SpreadCall::describe(CallSignature& signature) const {
  const KvCacheOptions& options = cache_.options();
  signature.add("isa", name_of(context_.isa()));
  signature.add("cache lengths", cache_.lengths_);
  signature.add("num_kv_heads", options.num_kv_heads);
  signature.add("head_dim", options.head_dim);
  signature.add("value_dim", options.value_dim);
  signature.add("values_in_keys", std::int64_t{options.values_in_keys});
  signature.add("cache format", name_of(options.format.dtype));
}

void SpreadCall::check_attention(const Operation& operation, const ConstTensorView& q,
                                 const AttentionOptions& options, const TensorView& out,
                                 const TensorView& lse, const SpreadAttentionOptions& spread,
                                 CallSignature& signature) {
  check_device(operation, "cache", cache_.local_.device());
  // The cache and the queries first, without keys; then what depends on their number.
  const std::vector<KvSequenceView> no_keys(lengths_.size());
  KvCacheView view = local_view();
  view.sequences = no_keys;
  AttentionOptions without = options;
  without.mask = without.bias = {};
  sizes_ = check_cache_inputs(operation, q, view, without);
  query_offsets_ = options.query_offsets;
  dtype_ = q.dtype();
  for (const std::int64_t length : lengths_) {
    sizes_.max_kv_len = std::max(sizes_.max_kv_len, length);
  }
  sizes_.kv_len = sizes_.max_kv_len;
  check_options(operation, options, sizes_);
  check_tensor(operation, {"out", out}, q.dtype(),
               {sizes_.batch, sizes_.query_len, sizes_.num_heads, sizes_.value_dim});
  if (!lse.absent()) check_lse(operation, {"lse", lse}, sizes_, q.dtype());
  const NamedView outputs[] = {{"out", out}, {"lse", lse}};
  const NamedView inputs[] = {{"q", q},
                              {"mask", options.mask},
                              {"bias", options.bias},
                              {"alibi_slopes", options.alibi_slopes},
                              {"sinks", options.sinks}};
  check_no_overlap(operation, outputs, inputs);
  signature.add("q", q);
  signature.add("lse", lse.absent() ? "none" : name_of(lse.dtype()));
  signature.add("reproducible", std::int64_t{spread.reproducible});
  describe_attention(options, signature);
}

std::int64_t SpreadCall::num_splits(const Piece& piece) const {
  // A sequence without keys has one split, which is empty.
  const std::int64_t length = lengths_[static_cast<std::size_t>(piece.sequence)];
  return std::max<std::int64_t>(1, (length + kSplit - 1) / kSplit);
}

std::int64_t SpreadCall::query_len_of(std::int64_t sequence) const {
  if (query_offsets_.empty()) return sizes_.query_len;
  const auto b = static_cast<std::size_t>(sequence);
  return query_offsets_[b + 1] - query_offsets_[b];
}

/// Of a sequence's first query, among its keys.
std::int64_t SpreadCall::position_of(std::int64_t sequence, const AttentionOptions& options) const {
  const std::int64_t length = lengths_[static_cast<std::size_t>(sequence)];
  return options.position_offset.value_or(length - query_len_of(sequence));
}

/// Attention over a KvCache has no parts to merge then, and a sink joins in the only one: its bits
/// need the same here.
std::optional<std::int64_t> SpreadCall::only_split(std::int64_t sequence,
                                                   const AttentionOptions& options) const {
  const std::int64_t position = position_of(sequence, options);
  const TokenRange seen = keys_seen(options, position, position + query_len_of(sequence) - 1,
                                    lengths_[static_cast<std::size_t>(sequence)]);
  if (seen.begin >= seen.end || seen.begin / kSplit != (seen.end - 1) / kSplit) return {};
  return seen.begin / kSplit;
}

/// Queries that are computed together, so that the partial results of all their splits fit
/// kPartialBytes on every rank.
std::vector<std::vector<SpreadCall::Piece>> SpreadCall::batches(std::int64_t bytes_of_query) const {
  std::vector<std::vector<Piece>> all;
  std::int64_t space = 0;
  for (std::int64_t b = 0; b < sizes_.num_sequences; ++b) {
    const std::int64_t ranks = cache_.communicator_.size();
    const std::int64_t most_splits = (num_splits({.sequence = b}) + ranks - 1) / ranks;
    const std::int64_t bytes = most_splits * bytes_of_query;
    const std::int64_t query_len = query_len_of(b);
    for (std::int64_t first = 0; first < query_len;) {
      if (space < bytes) {
        all.emplace_back();
        space = std::max(bytes, kPartialBytes);
      }
      const std::int64_t length = std::min(query_len - first, space / bytes);
      all.back().push_back({b, first, length});
      space -= length * bytes;
      first += length;
    }
  }
  return all;
}

SpreadCall::Part SpreadCall::attend_split(const ConstTensorView& q, const AttentionOptions& options,
                                          const Piece& piece, std::int64_t split) const {
  const auto b = static_cast<std::size_t>(piece.sequence);
  KvCacheView view = local_view();
  KvSequenceView keys = view.sequences[b];
  const std::int64_t local = split / cache_.communicator_.size() * kSplit;
  keys.length = std::min(kSplit, lengths_[b] - split * kSplit);
  if (view.page_size != 0) {
    keys.pages += local / view.page_size;
  } else {
    keys.first_slot += local;
  }
  view.sequences = std::span(&keys, 1);

  const std::int64_t query_len = query_len_of(piece.sequence);
  AttentionOptions own = options;
  own.position_offset = position_of(piece.sequence, options) + piece.first - split * kSplit;
  own.query_offsets = {};
  // They join when parts are merged.
  if (only_split(piece.sequence, options) != split) own.sinks = {};
  for (ConstTensorView* const operand : {&own.mask, &own.bias}) {
    *operand = slice_unless_one(*operand, 0, {piece.sequence, piece.sequence + 1});
    *operand = slice_unless_one(*operand, 2, {piece.first, piece.first + piece.length});
    *operand = slice_unless_one(*operand, 3, {split * kSplit, split * kSplit + keys.length});
  }
  own.dropout.first_sequence += piece.sequence;
  own.dropout.first_query += piece.first;
  own.dropout.first_key += split * kSplit;
  Part part{Tensor::uninitialized(context_, compute_dtype(dtype_),
                                  {1, piece.length, sizes_.num_heads, sizes_.value_dim}),
            Tensor::uninitialized(context_, DType::kF64, {1, sizes_.num_heads, piece.length})};
  ladon::attend(context_, rows_of(q, 1, piece), view, own, part.out, part.lse,
                {.query_len = query_len, .first_query = piece.first, .group = 0});
  return part;
}

/// This rank's splits, in the order of their keys.
std::vector<SpreadCall::Part> SpreadCall::attend_splits(const ConstTensorView& q,
                                                        const AttentionOptions& options,
                                                        const Piece& piece) const {
  std::vector<Part> parts;
  const int ranks = cache_.communicator_.size();
  for (std::int64_t split = cache_.communicator_.rank(); split < num_splits(piece);
       split += ranks) {
    parts.push_back(attend_split(q, options, piece, split));
  }
  return parts;
}

template <class Take>
void SpreadCall::attend_pieces(CollectiveCall& call, const ConstTensorView& q,
                               const AttentionOptions& options, bool reproducible,
                               const Take& take) {
  const std::int64_t bytes_of_query =
      sizes_.num_heads *
      (sizes_.value_dim * static_cast<std::int64_t>(size_of(compute_dtype(dtype_))) + 8);
  for (const std::vector<Piece>& pieces : batches(bytes_of_query)) {
    std::vector<std::vector<Part>> parts;
    for (const Piece& piece : pieces) {
      std::vector<Part> own = attend_splits(q, options, piece);
      if (!reproducible && own.size() > 1) {
        Part merged{Tensor::uninitialized(context_, own[0].out.dtype(), own[0].out.shape()),
                    Tensor::uninitialized(context_, DType::kF64, own[0].lse.shape())};
        merge_parts(context_, own, merged.out, merged.lse);
        context_.synchronize();  // before the parts are freed
        own.clear();
        own.push_back(std::move(merged));
      }
      parts.push_back(std::move(own));
    }
    context_.synchronize();
    take(pieces, exchange(call, pieces, parts, reproducible, options));
  }
}

void SpreadCall::attend(CollectiveCall& call, const ConstTensorView& q,
                        const AttentionOptions& options, bool reproducible, const TensorView& lse) {
  out_ = Tensor::uninitialized(
      context_, dtype_, {sizes_.batch, sizes_.query_len, sizes_.num_heads, sizes_.value_dim});
  if (!lse.absent()) lse_ = Tensor::uninitialized(context_, lse.dtype(), lse.shape());
  attend_pieces(call, q, options, reproducible,
                [&](const std::vector<Piece>& pieces, const Part& merged) {
                  gather_heads(call, pieces, merged);
                });
}

Tensor SpreadCall::attend_own_heads(CollectiveCall& call, const ConstTensorView& q,
                                    const AttentionOptions& options, bool reproducible) {
  sizes_ = sizes_of_cache_inputs(q, local_view(), options);
  query_offsets_ = options.query_offsets;
  dtype_ = q.dtype();
  const std::int64_t heads = share_of(sizes_.num_heads, call.rank(), call.size()).length();
  Tensor own = Tensor::uninitialized(context_, dtype_,
                                     {sizes_.batch, sizes_.query_len, heads, sizes_.value_dim});
  attend_pieces(call, q, options, reproducible,
                [&](const std::vector<Piece>& pieces, const Part& merged) {
                  put_rows(pieces, 1, merged.out, own);
                  context_.synchronize();  // before what was merged is freed
                });
  return own;
}

void SpreadCall::publish(const TensorView& out, const TensorView& lse) const {
  copy(context_, out_, out);
  if (!lse.absent()) copy(context_, lse_, lse);
  context_.synchronize();
}

void spread_attention(const Context& context, const SpreadKvCache& cache, const ConstTensorView& q,
                      const AttentionOptions& options, const TensorView& out, const TensorView& lse,
                      const SpreadAttentionOptions& spread) {
  const Operation operation("spread_attention", context);
  SpreadCall own(context, const_cast<SpreadKvCache&>(cache));  // which it does not change
  run_collective(
      cache.communicator(), operation,
      [&](CallSignature& signature) {
        own.describe(signature);
        own.check_attention(operation, q, options, out, lse, spread, signature);
      },
      [&](CollectiveCall& call) { own.attend(call, q, options, spread.reproducible, lse); },
      [&] { own.publish(out, lse); });
}

void append_and_attend(const Context& context, SpreadKvCache& cache, const ConstTensorView& q,
                       const ConstTensorView& k, const ConstTensorView& v,
                       const AttentionOptions& options, const TensorView& out,
                       const TensorView& lse, const SpreadAttentionOptions& spread) {
  const Operation operation("append_and_attend", context);
  SpreadCall own(context, cache);
  run_collective(
      cache.communicator(), operation,
      [&](CallSignature& signature) {
        own.describe(signature);
        own.append(operation, k, v, {}, signature);
        own.check_attention(operation, q, options, out, lse, spread, signature);
      },
      [&](CollectiveCall& call) { own.attend(call, q, options, spread.reproducible, lse); },
      [&] {
        own.publish(out, lse);
        own.commit();
      });
}

}  // namespace ladon
