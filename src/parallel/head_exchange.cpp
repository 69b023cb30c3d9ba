#include "parallel/head_exchange.h"

#include <algorithm>

#include "parallel/host_messages.h"

namespace ladon {
namespace {

/// A stage's queries and heads of an array with all of a rank's queries and all heads.
Tensor memory_for(const Context& context, Dims shape, DType dtype, const HeadStage& stage) {
  const bool is_lse = shape.rank() == 3;
  shape[is_lse ? 2 : 1] = stage.queries.length();
  shape[is_lse ? 1 : 2] = stage.heads.length();
  return Tensor::uninitialized(context, dtype, shape);
}

}  // namespace

HeadShares::HeadShares(const ContextCall& own, const CollectiveCall& call, bool backward)
    : own_(own),
      rank_(call.rank()),
      ranks_(call.size()),
      num_heads_(sizes().num_heads / ranks_),
      num_kv_heads_(std::max<std::int64_t>(1, sizes().num_kv_heads / ranks_)) {
  const std::vector<Range> of_heads = stages_of(num_heads_, num_heads_at_once());
  num_parts_ = num_parts(static_cast<std::int64_t>(of_heads.size()));
  for (const Range& heads : of_heads) {
    const bool is_last = heads.end == num_heads_;
    if (backward && is_last && of_heads.size() > 1) {
      add_stages_from_the_end(heads);
    } else {
      add_stages(heads);
    }
  }
}

/// From the first queries on: under a causal mask the keys come part by part too, so that little is
/// sent before the first stage.
void HeadShares::add_stages(const Range& heads) {
  const bool are_last_heads = heads.end % group() == 0;
  for (std::int64_t part = 0; part < num_parts_; ++part) {
    const bool is_last = part + 1 == num_parts_;
    const Range queries = share_of(sizes().query_len, part, num_parts_);
    HeadStage& stage = stages_.emplace_back();
    stage = {.heads = heads,
             .queries = {queries.begin, queries.end},
             .keys_end = is_last ? sizes().kv_len : own_.whole.end_of_keys_seen(queries.end),
             .is_last_of_keys = is_last && are_last_heads};
    if (stage.is_last_of_keys) stage.keys_done = {0, sizes().kv_len};
  }
}

/// The last heads in backward, from the last queries on: under a causal mask the sums of dk and dv
/// of the last keys are complete first, so that little is sent after the last stage.
void HeadShares::add_stages_from_the_end(const Range& heads) {
  std::int64_t done = sizes().kv_len;
  for (std::int64_t part = num_parts_ - 1; part >= 0; --part) {
    const Range queries = share_of(sizes().query_len, part, num_parts_);
    const std::int64_t still_seen =
        part == 0 ? 0 : std::min(done, own_.whole.end_of_keys_seen(queries.begin));
    stages_.push_back({.heads = heads,
                       .queries = {queries.begin, queries.end},
                       .keys_end = sizes().kv_len,
                       .keys_done = {still_seen, done},
                       .is_last_of_keys = part == 0});
    done = still_seen;
  }
}

Range HeadShares::heads_of(int rank, bool is_key, const Range& heads) const {
  const std::int64_t first =
      share_of(is_key ? sizes().num_kv_heads : sizes().num_heads, rank, ranks_).begin;
  return {first + heads.begin, first + heads.end};
}

/// Heads that are exchanged together share a KV head, or have whole ones.
std::int64_t HeadShares::num_heads_at_once() const {
  std::int64_t at_once = own_.whole.kv_heads_at_once() * group();
  if (at_once == 0) {
    at_once = heads_at_once(own_, num_heads_,
                            sizes().batch * sizes().query_len * sizes().head_dim *
                                static_cast<std::int64_t>(size_of(own_.q.dtype())));
  }
  if (at_once >= group()) return at_once / group() * group();
  while (group() % at_once != 0) --at_once;
  return at_once;
}

/// The messages before the first stage and after the last one are not hidden: a rank with few heads
/// needs more stages than heads. Each part is one call of attention, so only of one sequence.
std::int64_t HeadShares::num_parts(std::int64_t stages_of_heads) const {
  if (sizes().num_sequences != 1 || sizes().packed || !own_.whole.options().kv_lengths.empty()) {
    return 1;
  }
  constexpr std::int64_t kStages = 16;
  // From one rank to another, about: 10 GbE takes as long for its latency.
  constexpr std::int64_t kLeastMessage = std::int64_t{32} << 10;
  const std::int64_t bytes = sizes().query_len * (2 * sizes().head_dim + sizes().value_dim) *
                             static_cast<std::int64_t>(size_of(own_.q.dtype())) /
                             (std::int64_t{ranks_} * ranks_);
  const std::int64_t wanted = (kStages + stages_of_heads - 1) / stages_of_heads;
  return std::clamp<std::int64_t>(bytes / kLeastMessage, 1, wanted);
}

ExchangePart::Arrays HeadExchange::arrays_of(int rank) const {
  Arrays arrays;
  for (const HeadArray& array : arrays_) {
    Dims shape = array.by_heads.shape();
    shape[array.token_dim()] = total_length(tokens_of(array, rank));
    arrays.push_back({array.by_heads.dtype(), shape});
  }
  return arrays;
}

std::vector<TokenRange> HeadExchange::tokens_of(const HeadArray& array, int rank) const {
  std::vector<TokenRange> tokens;
  for (const TokenRange& own : shares_.tokens_of(rank, array.is_key)) {
    const TokenRange both{std::max(own.begin, array.tokens.begin),
                          std::min(own.end, array.tokens.end)};
    if (both.begin < both.end) tokens.push_back(both);
  }
  return tokens;
}

std::vector<TokenRange> HeadExchange::places_of(const HeadArray& array, int rank) const {
  std::vector<TokenRange> tokens = tokens_of(array, rank);
  for (TokenRange& range : tokens) {
    range = {range.begin - array.tokens.begin, range.end - array.tokens.begin};
  }
  return tokens;
}

template <class Body>
void HeadExchange::for_each_own_run(const HeadArray& array, int other, const TensorView& message,
                                    const Body& body) const {
  const int dim = array.token_dim();
  const Range heads = shares_.heads_of(other, array.is_key, array.heads);
  const TensorView own = array.by_tokens.slice(array.head_dim(), heads.begin, heads.end);
  for_each_own(shares_.tokens_of(shares_.rank(), array.is_key), tokens_of(array, shares_.rank()),
               [&](std::int64_t local, std::int64_t first, std::int64_t count) {
                 body(own.slice(dim, local, local + count),
                      message.slice(dim, first, first + count));
               });
}

void ToHeads::add_input(const ConstTensorView& input, bool is_key, const Range& heads,
                        const TokenRange& tokens, const TensorView& by_heads) {
  // The input is only read.
  const TensorView by_tokens(const_cast<void*>(input.data()), input.dtype(), input.shape(),
                             input.strides(), input.device());
  add({by_tokens, by_heads, is_key, heads, tokens});
}

Tensor ToHeads::add_input(const ConstTensorView& input, const HeadStage& stage) {
  Tensor made = memory_for(shares_.own().context, input.shape(), input.dtype(), stage);
  add_input(input, false, stage.heads, stage.queries, made);
  return made;
}

void ToHeads::pack(int other, std::span<const TensorView> arrays) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    for_each_own_run(arrays_[i], other, arrays[i],
                     [&](const TensorView& own, const TensorView& message) {
                       copy(shares_.own().context, own, message);
                     });
  }
}

void ToHeads::unpack(int other, std::span<const TensorView> arrays) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const HeadArray& array = arrays_[i];
    put_tokens(shares_.own().context, arrays[i], places_of(array, other), array.token_dim(),
               array.by_heads);
  }
}

Tensor ToTokens::add_result(Tensor& result, const HeadStage& stage) {
  if (result.rank() == 0) return {};  // not wanted
  Tensor made = memory_for(shares_.own().context, result.shape(), result.dtype(), stage);
  add({result, made, false, stage.heads, stage.queries});
  return made;
}

void ToTokens::pack(int other, std::span<const TensorView> arrays) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const HeadArray& array = arrays_[i];
    take_tokens(shares_.own().context, array.by_heads, places_of(array, other), array.token_dim(),
                arrays[i]);
  }
}

void ToTokens::unpack(int other, std::span<const TensorView> arrays) {
  const Context& context = shares_.own().context;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const auto first_head = [&](int rank) {
      return shares_.heads_of(rank, arrays_[i].is_key, arrays_[i].heads).begin;
    };
    const bool is_first = other == 0 || first_head(other - 1) != first_head(other);
    for_each_own_run(arrays_[i], other, arrays[i],
                     [&](const TensorView& own, const TensorView& message) {
                       if (is_first) return copy(context, message, own);
                       const Tensor term = on_device(context, message);
                       add_to(context, term, own);
                       context.synchronize();  // before `term` is freed
                     });
  }
}

}  // namespace ladon
