#include "parallel/whole_attention.h"

#include <algorithm>
#include <string>

#include "core/fail.h"
#include "parallel/message_layout.h"

namespace ladon {
namespace {

std::int64_t whole_length(const std::vector<std::vector<TokenRange>>& ranges) {
  std::int64_t length = 0;
  for (const std::vector<TokenRange>& of_rank : ranges) length += total_length(of_rank);
  return length;
}

/// A rank's view as if all tokens were its own: for checks, which read no element.
ConstTensorView as_whole(const ConstTensorView& own, std::int64_t length) {
  if (own.rank() != 4) return own;
  alignas(64) static constexpr std::byte kNothing[64] = {};
  Dims shape = own.shape();
  Dims strides = own.strides();
  shape[1] = length;
  strides[1] = 0;
  return {own.data() == nullptr ? kNothing : own.data(), own.dtype(), shape, strides, own.device()};
}

void check_ranges(const Operation& operation, std::string_view argument,
                  const std::vector<std::vector<TokenRange>>& ranges, int ranks) {
  if (ranges.size() != static_cast<std::size_t>(ranks)) {
    fail(operation, argument,
         "got ranges for " + std::to_string(ranges.size()) + " ranks, expected " +
             std::to_string(ranks));
  }
  std::vector<TokenRange> all;
  for (const std::vector<TokenRange>& of_rank : ranges) {
    std::int64_t last = 0;
    for (const TokenRange& range : of_rank) {
      if (range.begin < last || range.end < range.begin) {
        fail(operation, argument,
             "got [" + std::to_string(range.begin) + ", " + std::to_string(range.end) + ") after " +
                 std::to_string(last) + ", expected ascending ranges");
      }
      last = range.end;
      if (range.length() > 0) all.push_back(range);
    }
  }
  std::sort(all.begin(), all.end(),
            [](const TokenRange& a, const TokenRange& b) { return a.begin < b.begin; });
  std::int64_t next = 0;
  for (const TokenRange& range : all) {
    if (range.begin != next) {
      fail(operation, argument,
           "got token " + std::to_string(std::min(range.begin, next)) +
               (range.begin < next ? " twice" : " nowhere") + ", expected one owner of each");
    }
    next = range.end;
  }
}

void check_own(const Operation& operation, const NamedView& argument,
               std::span<const TokenRange> ranges) {
  const std::int64_t expected = total_length(ranges);
  if (argument.view.size(1) == expected) return;
  fail(operation, argument.name,
       got_shape(argument.view) + ", expected " + std::to_string(expected) +
           " tokens, as many as the plan gives this rank");
}

void slice_heads(AttentionOptions& options, const Range& heads) {
  for (ConstTensorView* view : {&options.mask, &options.bias}) {
    *view = slice_unless_one(*view, 1, heads);
  }
  for (ConstTensorView* view : {&options.alibi_slopes, &options.sinks}) {
    if (!view->absent()) *view = view->slice(0, heads.begin, heads.end);
  }
  options.dropout.first_head += heads.begin;
}

std::string text_of_optional(const std::optional<std::int64_t>& value) {
  return value.has_value() ? std::to_string(*value) : "none";
}

}  // namespace

void describe_attention(const AttentionOptions& options, CallSignature& signature) {
  signature.add("scale", options.scale.has_value() ? text_of(*options.scale) : "none");
  signature.add("causal", std::int64_t{options.causal});
  signature.add("alignment", static_cast<std::int64_t>(options.alignment));
  signature.add("position_offset", text_of_optional(options.position_offset));
  signature.add("window_left", text_of_optional(options.window_left));
  signature.add("window_right", text_of_optional(options.window_right));
  signature.add("mask", options.mask);
  signature.add("bias", options.bias);
  signature.add("kv_lengths", options.kv_lengths);
  signature.add("query_offsets", options.query_offsets);
  signature.add("kv_offsets", options.kv_offsets);
  signature.add("softcap", options.softcap);
  signature.add("alibi_slopes", options.alibi_slopes);
  signature.add("sinks", options.sinks);
  signature.add("dropout.probability", options.dropout.probability);
  signature.add("dropout.seed", std::to_string(options.dropout.seed));
  signature.add("dropout.first_sequence", options.dropout.first_sequence);
  signature.add("dropout.first_head", options.dropout.first_head);
  signature.add("dropout.first_query", options.dropout.first_query);
  signature.add("dropout.first_key", options.dropout.first_key);
}

TokenRange keys_seen(const AttentionOptions& options, std::int64_t first, std::int64_t last,
                     std::int64_t length) {
  TokenRange keys{0, length};
  if (options.window_left.has_value() && *options.window_left < first) {
    keys.begin = first - *options.window_left;
  }
  if (options.causal) {
    keys.end = std::min(keys.end, last + 1);
  } else if (options.window_right.has_value() && *options.window_right < kNoWindow) {
    keys.end = std::min(keys.end, last + *options.window_right + 1);
  }
  return keys;
}

WholeAttention::WholeAttention(const Operation& operation, const Communicator& communicator,
                               const ConstTensorView& q, const ConstTensorView& k,
                               const ConstTensorView& v, const AttentionOptions& options,
                               const ContextPlan& plan)
    : q_(q), k_(k), v_(v), options_(options), plan_(plan) {
  check_plan(operation, communicator.size());
  const std::int64_t query_len = whole_length(plan.queries);
  const std::int64_t kv_len = whole_length(plan.keys);
  check_present(operation, {"v", v});
  sizes_ = check_inputs(operation, as_whole(q, query_len), as_whole(k, kv_len), as_whole(v, kv_len),
                        options);
  for (const NamedView& argument : {NamedView{"q", q}, NamedView{"k", k}, NamedView{"v", v}}) {
    check_view(operation, argument, 4);
  }
  check_own(operation, {"q", q}, queries_of(communicator.rank()));
  check_own(operation, {"k", k}, keys_of(communicator.rank()));
  check_own(operation, {"v", v}, keys_of(communicator.rank()));
  choose_scheme(operation, communicator.size());
}

void WholeAttention::check_plan(const Operation& operation, int ranks) const {
  check_ranges(operation, "plan.queries", plan_.queries, ranks);
  check_ranges(operation, "plan.keys", plan_.keys, ranks);
  if (plan_.kv_heads_at_once < 0) {
    fail(operation, "plan.kv_heads_at_once",
         "got " + std::to_string(plan_.kv_heads_at_once) + ", expected 0 or more");
  }
  if (plan_.scheme > ContextScheme::kUlysses) {
    fail(operation, "plan.scheme",
         "got " + std::to_string(static_cast<int>(plan_.scheme)) + ", expected a ContextScheme");
  }
}

void WholeAttention::choose_scheme(const Operation& operation, int ranks) {
  const std::int64_t heads = sizes_.num_heads;
  const std::int64_t kv_heads = sizes_.num_kv_heads;
  const bool divides = heads % ranks == 0 && (kv_heads % ranks == 0 || ranks % kv_heads == 0);
  if (plan_.scheme == ContextScheme::kUlysses && !divides) {
    fail(operation, "plan.scheme",
         "got kUlysses for " + std::to_string(heads) + " heads and " + std::to_string(kv_heads) +
             " KV heads over " + std::to_string(ranks) +
             " ranks, expected heads that are a multiple of the ranks, and KV heads that are a "
             "multiple or a divisor of them");
  }
  scheme_ = plan_.scheme;
  if (scheme_ != ContextScheme::kAuto) return;
  // What an average rank sends; all ranks come to the same.
  const double queries = static_cast<double>(sizes_.batch * sizes_.query_len) / ranks;
  const double keys = static_cast<double>(sizes_.batch * sizes_.kv_len) / ranks;
  const double dims = static_cast<double>(sizes_.head_dim + sizes_.value_dim);
  const double others = ranks - 1;
  const double key_bytes = keys * dims * static_cast<double>(size_of(k_.dtype())) * others;
  const double query_bytes = queries * dims * static_cast<double>(size_of(q_.dtype())) * others;
  const double gathered = key_bytes * static_cast<double>(kv_heads);
  const double exchanged =
      query_bytes * static_cast<double>(heads) / ranks +
      key_bytes * static_cast<double>(std::max<std::int64_t>(kv_heads, ranks)) / ranks;
  scheme_ = divides && exchanged < gathered ? ContextScheme::kUlysses : ContextScheme::kAllGather;
}

void WholeAttention::describe(const Context& context, CallSignature& signature) const {
  signature.add("isa", name_of(context.isa()));
  const auto add_whole = [&](std::string_view name, const ConstTensorView& view,
                             std::int64_t length) { signature.add(name, as_whole(view, length)); };
  add_whole("q", q_, sizes_.query_len);
  add_whole("k", k_, sizes_.kv_len);
  add_whole("v", v_, sizes_.kv_len);
  signature.add("scheme", static_cast<std::int64_t>(scheme_));
  signature.add("kv_heads_at_once", plan_.kv_heads_at_once);
  for (const auto* ranges : {&plan_.queries, &plan_.keys}) {
    std::vector<std::int64_t> borders;
    for (const std::vector<TokenRange>& of_rank : *ranges) {
      for (const TokenRange& range : of_rank) {
        borders.push_back(range.begin);
        borders.push_back(range.end);
      }
      borders.push_back(-1);
    }
    signature.add(ranges == &plan_.queries ? "plan.queries" : "plan.keys", borders);
  }
  describe_attention(options_, signature);
}

std::int64_t WholeAttention::query_len_of(std::int64_t sequence) const {
  if (!sizes_.packed) return sizes_.query_len;
  const auto i = static_cast<std::size_t>(sequence);
  return options_.query_offsets[i + 1] - options_.query_offsets[i];
}

TokenRange WholeAttention::keys_of_sequence(std::int64_t sequence) const {
  const auto i = static_cast<std::size_t>(sequence);
  if (sizes_.packed) return {options_.kv_offsets[i], options_.kv_offsets[i + 1]};
  return {0, options_.kv_lengths.empty() ? sizes_.kv_len : options_.kv_lengths[i]};
}

std::vector<QueryPiece> WholeAttention::pieces_of(std::span<const TokenRange> queries) const {
  std::vector<QueryPiece> pieces;
  for_each_range(queries, [&](const TokenRange& range, std::int64_t local) {
    for (std::int64_t s = 0; s < sizes_.num_sequences; ++s) {
      const std::int64_t start =
          sizes_.packed ? options_.query_offsets[static_cast<std::size_t>(s)] : 0;
      const std::int64_t begin = std::max(range.begin, start);
      const std::int64_t end = std::min(range.end, start + query_len_of(s));
      if (begin >= end) continue;
      pieces.push_back({.sequence = s,
                        .batch = sizes_.packed ? 0 : s,
                        .local = local + begin - range.begin,
                        .first = begin - start,
                        .length = end - begin});
    }
  });
  return pieces;
}

std::int64_t WholeAttention::position_of(const QueryPiece& piece) const {
  const std::int64_t corner =
      options_.alignment == Alignment::kBottomRight
          ? keys_of_sequence(piece.sequence).length() - query_len_of(piece.sequence)
          : 0;
  return options_.position_offset.value_or(corner) + piece.first;
}

std::vector<TokenRange> WholeAttention::keys_read_by(std::span<const TokenRange> queries) const {
  std::vector<TokenRange> ranges;
  for (const QueryPiece& piece : pieces_of(queries)) {
    const TokenRange keys = keys_of_sequence(piece.sequence);
    const std::int64_t first = position_of(piece);
    const std::int64_t last = first + piece.length - 1;
    const TokenRange seen = keys_seen(options_, first, last, keys.length());
    if (seen.begin < seen.end) ranges.push_back({keys.begin + seen.begin, keys.begin + seen.end});
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const TokenRange& a, const TokenRange& b) { return a.begin < b.begin; });
  std::vector<TokenRange> merged;
  for (const TokenRange& range : ranges) {
    if (!merged.empty() && range.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, range.end);
    } else {
      merged.push_back(range);
    }
  }
  return merged;
}

std::int64_t WholeAttention::end_of_keys_seen(std::int64_t queries) const {
  const TokenRange first{0, queries};
  const std::vector<TokenRange> read = keys_read_by(std::span(&first, 1));
  return read.empty() ? 0 : read.back().end;
}

std::vector<TokenRange> WholeAttention::keys_between(int owner, int reader) const {
  std::vector<TokenRange> shared;
  const std::vector<TokenRange> read = keys_read_by(queries_of(reader));
  for (const TokenRange& own : keys_of(owner)) {
    for (const TokenRange& range : read) {
      const TokenRange both{std::max(own.begin, range.begin), std::min(own.end, range.end)};
      if (both.begin < both.end) shared.push_back(both);
    }
  }
  return shared;
}

AttentionOptions WholeAttention::options_of(const Range& heads) const {
  AttentionOptions options = options_;
  slice_heads(options, heads);
  return options;
}

AttentionOptions WholeAttention::options_of(const QueryPiece& piece, const Range& heads) const {
  AttentionOptions options = options_of(heads);
  const std::int64_t kv_len = keys_of_sequence(piece.sequence).length();
  options.position_offset = position_of(piece);
  options.alignment = Alignment::kBottomRight;
  options.kv_lengths = {};
  options.query_offsets = {};
  options.kv_offsets = {};
  for (ConstTensorView* view : {&options.mask, &options.bias}) {
    *view = slice_unless_one(*view, 0, {piece.sequence, piece.sequence + 1});
    *view = slice_unless_one(*view, 2, {piece.first, piece.first + piece.length});
    *view = slice_unless_one(*view, 3, {0, kv_len});
  }
  options.dropout.first_sequence += piece.sequence;
  options.dropout.first_query += piece.first;
  return options;
}

}  // namespace ladon
