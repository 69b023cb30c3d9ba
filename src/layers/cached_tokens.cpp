#include "layers/cached_tokens.h"

#include <algorithm>
#include <string>

#include "attention/validate.h"
#include "cache/kv_cache_impl.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "layers/layer_call.h"
#include "layers/rows.h"

namespace ladon {
namespace {

CachedTokens check_new_tokens(const Operation& operation, const AttentionLayer& layer,
                              const ConstTensorView& x, std::int64_t batch,
                              const CachedCall& call) {
  check_tokens(operation, {"x", x}, layer.dtype(), layer.embed_dim());
  CachedTokens tokens;
  tokens.batch = batch;
  tokens.lengths = call.new_lengths;
  tokens.query_positions = call.query_positions;
  tokens.packed = x.rank() == 2;
  tokens.seq = x.size(x.rank() - 2);
  if (tokens.packed ? tokens.lengths.empty() && batch != 1 : x.size(0) != batch) {
    fail(operation, "x",
         got_shape(x) + ", expected a batch of " + std::to_string(batch) + " as the cache has");
  }
  if (!tokens.lengths.empty() && static_cast<std::int64_t>(tokens.lengths.size()) != batch) {
    fail(operation, "new_lengths",
         "got " + std::to_string(tokens.lengths.size()) + " lengths, expected " +
             std::to_string(batch) + ": one for each sequence of the cache");
  }
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t count = tokens.count(b);
    if (count < 0 || count > tokens.seq) {
      fail(operation, "new_lengths",
           "got " + std::to_string(count) + " at index " + std::to_string(b) +
               ", expected 0 to x's " + std::to_string(tokens.seq) + " tokens");
    }
    tokens.total += count;
    if (tokens.packed && tokens.total > tokens.seq) break;
  }
  if (tokens.packed && tokens.total != tokens.seq) {
    fail(operation, "new_lengths",
         "got a sum other than x's " + std::to_string(tokens.seq) +
             " tokens, expected the packed tokens of all sequences");
  }
  return tokens;
}

void check_cache(const Operation& operation, const AttentionLayer& layer, const KvCache& cache) {
  const KvCacheOptions expected = layer.cache_options();
  const KvCacheOptions& held = cache.options();
  const auto text = [](const KvCacheOptions& options) {
    return std::to_string(options.num_kv_heads) + " KV heads of " +
           std::to_string(options.head_dim) + " and " + std::to_string(options.value_dim) +
           (options.values_in_keys ? " within them" : "");
  };
  if (held.num_kv_heads != expected.num_kv_heads || held.head_dim != expected.head_dim ||
      held.value_dim != expected.value_dim || held.values_in_keys != expected.values_in_keys) {
    fail(operation, "cache",
         "got one of " + text(held) + ", expected the layer's " + text(expected));
  }
  if (held.format.dtype == DType::kF64 && layer.dtype() != DType::kF64) {
    fail(operation, "cache",
         std::string("got dtype f64, expected a narrower one for a layer of ") +
             name_of(layer.dtype()));
  }
}

}  // namespace

CachedTokens check_cached_call(const Operation& operation, const AttentionLayer& layer,
                               const ConstTensorView& x, const KvCache& cache,
                               const CachedCall& call, const TensorView& out,
                               std::span<const std::int64_t> spread) {
  check_device(operation, "layer", layer.device());
  check_device(operation, "cache", cache.device());
  CachedTokens tokens = check_new_tokens(operation, layer, x, cache.batch(), call);
  tokens.past = spread.empty() ? cache.impl().lengths() : spread;
  check_cache(operation, layer, cache);
  check_tensor(operation, {"out", out}, layer.dtype(), x.shape());
  if (!call.query.absent()) {
    check_tensor(operation, {"query", call.query}, layer.dtype(), x.shape());
  }
  const std::int64_t count = x.num_elements() / layer.embed_dim();
  if (!call.query_positions.empty() &&
      static_cast<std::int64_t>(call.query_positions.size()) != count) {
    fail(operation, "query_positions",
         "got " + std::to_string(call.query_positions.size()) + " positions, expected " +
             std::to_string(count) + ": one for each token of x");
  }
  const KvCacheView view = cache.view();
  const NamedView outputs[] = {{"out", out}};
  const NamedView inputs[] = {{"x", x},
                              {"query", call.query},
                              {"mask", call.mask},
                              {"bias", call.bias},
                              {"cache", cache_keys(view)},
                              {"cache", cache_values(view)}};
  check_no_overlap(operation, outputs, inputs);
  // Before the append, which may evict unowned prefixes from a pool.
  AttentionSizes sizes{.num_sequences = tokens.batch, .num_heads = layer.num_heads()};
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    sizes.max_query_len = std::max(sizes.max_query_len, tokens.count(b));
    const std::int64_t held = spread.empty() ? cache.held(b) : spread[static_cast<std::size_t>(b)];
    sizes.max_kv_len = std::max(sizes.max_kv_len, held + tokens.count(b));
  }
  check_mask_and_bias(operation, call.mask, call.bias, sizes);
  return tokens;
}

RowLists::RowLists(Arena& arena, const CachedTokens& tokens)
    : positions(arena.take<std::int64_t>(tokens.total), static_cast<std::size_t>(tokens.total)),
      query_positions(positions),
      offsets(arena.take<std::int64_t>(tokens.batch + 1),
              static_cast<std::size_t>(tokens.batch + 1)),
      counts(arena.take<std::int64_t>(tokens.batch), static_cast<std::size_t>(tokens.batch)) {
  if (tokens.query_positions.empty()) return;
  query_positions = {arena.take<std::int64_t>(tokens.total),
                     static_cast<std::size_t>(tokens.total)};
}

void RowLists::fill(const CachedTokens& tokens) {
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    offsets[i] = row;
    counts[i] = tokens.count(b);
    for (std::int64_t t = 0; t < counts[i]; ++t) {
      positions[static_cast<std::size_t>(row + t)] = tokens.past[i] + t;
      if (tokens.query_positions.empty()) continue;
      const std::int64_t from = tokens.packed ? row + t : b * tokens.seq + t;
      query_positions[static_cast<std::size_t>(row + t)] =
          tokens.query_positions[static_cast<std::size_t>(from)];
    }
    row += counts[i];
  }
  offsets.back() = row;
}

InputTokens::InputTokens(Arena& arena, const CachedTokens& tokens, const ConstTensorView& x)
    : x_(x), staged_(tokens.padded() || as_rows(x).absent()) {
  if (staged_) rows_ = arena.take_rows(tokens.total, x.size(2), x.dtype());
}

ConstTensorView InputTokens::rows(const Context& context, const CachedTokens& tokens,
                                  const RowLists& lists) const {
  if (!staged_) return as_rows(x_);
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t begin = lists.offsets[static_cast<std::size_t>(b)];
    const std::int64_t count = tokens.count(b);
    copy(context, x_.select(0, b).slice(0, 0, count), rows_.slice(0, begin, begin + count));
  }
  return rows_;
}

TokenRows::TokenRows(Arena& arena, const CachedTokens& tokens, const ConstTensorView& x,
                     const CachedCall& call, const TensorView& out)
    : input_(arena, tokens, x), staged_output_(tokens.padded() || as_rows(out).absent()) {
  if (!call.query.absent()) query_.emplace(arena, tokens, call.query);
  output_ = staged_output_ ? arena.take_rows(tokens.total, out.size(2), out.dtype()) : as_rows(out);
}

TokenRows::Inputs TokenRows::inputs(const Context& context, const CachedTokens& tokens,
                                    const RowLists& lists) const {
  const ConstTensorView rows = input_.rows(context, tokens, lists);
  return {rows, query_ ? query_->rows(context, tokens, lists) : rows};
}

void TokenRows::finish(const Context& context, const CachedTokens& tokens, const RowLists& lists,
                       const TensorView& out) const {
  if (!staged_output_) return;
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t begin = lists.offsets[static_cast<std::size_t>(b)];
    const std::int64_t count = tokens.count(b);
    const TensorView sequence = out.select(0, b);
    copy(context, output_.slice(0, begin, begin + count), sequence.slice(0, 0, count));
    if (count < out.size(1)) backend_of(context).zero(sequence.slice(0, count, out.size(1)));
  }
}

}  // namespace ladon
