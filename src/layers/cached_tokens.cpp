#include "layers/cached_tokens.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "attention/validate.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "core/integer.h"
#include "layers/rows.h"

namespace ladon {
namespace {

constexpr std::size_t kAlignment = 64;
constexpr std::size_t kMostPieces = 16;  // each of them rounded up

CachedTokens check_tokens(std::string_view operation, const AttentionLayer& layer,
                          const ConstTensorView& x, std::int64_t batch, const CachedCall& call) {
  const NamedView argument{"x", x};
  check_present(operation, argument);
  if (x.rank() != 2 && x.rank() != 3) {
    fail(operation, "x", got_shape(x) + ", expected [batch, seq, embed_dim] or [seq, embed_dim]");
  }
  check_view(operation, argument, x.rank());
  check_dtype(operation, argument, layer.dtype());
  if (x.size(x.rank() - 1) != layer.embed_dim()) {
    fail(operation, "x",
         got_shape(x) + ", expected a width of " + std::to_string(layer.embed_dim()));
  }
  CachedTokens tokens;
  tokens.batch = batch;
  tokens.lengths = call.new_lengths;
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

void check_cache(std::string_view operation, const AttentionLayer& layer, const KvCache& cache) {
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
  if (held.dtype == DType::kF64 && layer.dtype() != DType::kF64) {
    fail(operation, "cache",
         std::string("got dtype f64, expected a narrower one for a layer of ") +
             name_of(layer.dtype()));
  }
}

}  // namespace

CachedTokens check_cached_call(std::string_view operation, const AttentionLayer& layer,
                               const ConstTensorView& x, const KvCache& cache,
                               const CachedCall& call, const TensorView& out) {
  const CachedTokens tokens = check_tokens(operation, layer, x, cache.batch(), call);
  check_cache(operation, layer, cache);
  check_tensor(operation, {"out", out}, layer.dtype(), x.shape());
  const KvCacheView view = cache.view();
  const NamedView outputs[] = {{"out", out}};
  const NamedView inputs[] = {{"x", x},
                              {"mask", call.mask},
                              {"bias", call.bias},
                              {"cache", cache_keys(view)},
                              {"cache", cache_values(view)}};
  check_no_overlap(operation, outputs, inputs);
  // Before the append: it may cost a pool prefixes that nobody holds.
  AttentionSizes sizes{.num_sequences = tokens.batch, .num_heads = layer.num_heads()};
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    sizes.max_query_len = std::max(sizes.max_query_len, tokens.count(b));
    sizes.max_kv_len = std::max(sizes.max_kv_len, cache.held(b) + tokens.count(b));
  }
  check_mask_and_bias(operation, call.mask, call.bias, sizes);
  return tokens;
}

CachedRows::CachedRows(const Context& context, const CachedTokens& tokens, const KvCache& cache,
                       std::size_t bytes)
    : tokens_(tokens),
      workspace_(
          context.impl().workspaces(),
          bytes + kMostPieces * kAlignment +
              sizeof(std::int64_t) * static_cast<std::size_t>(tokens.total + 2 * tokens.batch + 1)),
      positions_(take_numbers(tokens.total)),
      offsets_(take_numbers(tokens.batch + 1)),
      counts_(take_numbers(tokens.batch)) {
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    offsets_[i] = row;
    counts_[i] = tokens.count(b);
    for (std::int64_t t = 0; t < counts_[i]; ++t) {
      positions_[static_cast<std::size_t>(row + t)] = cache.length(b) + t;
    }
    row += counts_[i];
  }
  offsets_.back() = row;
}

std::byte* CachedRows::take_bytes(std::size_t size) {
  std::byte* const data = workspace_.data() + used_;
  used_ += round_up(size, kAlignment);
  return data;
}

std::span<std::int64_t> CachedRows::take_numbers(std::int64_t count) {
  const auto size = static_cast<std::size_t>(count);
  return {reinterpret_cast<std::int64_t*>(take_bytes(size * sizeof(std::int64_t))), size};
}

TensorView CachedRows::take(std::int64_t rows, std::int64_t width, DType dtype) {
  return {
      take_bytes(static_cast<std::size_t>(rows * width) * size_of(dtype)), dtype, {rows, width}};
}

std::size_t CachedRows::bytes_of_rows(const CachedTokens& tokens, std::int64_t width, DType dtype) {
  return saturating_product(static_cast<std::size_t>(tokens.total),
                            static_cast<std::size_t>(width) * size_of(dtype));
}

ConstTensorView CachedRows::input(const ConstTensorView& x) {
  const ConstTensorView direct = tokens_.padded() ? ConstTensorView() : as_rows(x);
  if (!direct.absent()) return direct;
  const TensorView rows = take(tokens_.total, x.size(2), x.dtype());
  for (std::int64_t b = 0; b < tokens_.batch; ++b) {
    const std::int64_t begin = offsets_[static_cast<std::size_t>(b)];
    const std::int64_t count = tokens_.count(b);
    copy(x.select(0, b).slice(0, 0, count), rows.slice(0, begin, begin + count));
  }
  return rows;
}

TensorView CachedRows::output(const TensorView& out) {
  const TensorView direct = tokens_.padded() ? TensorView() : as_rows(out);
  return direct.absent() ? take(tokens_.total, out.size(2), out.dtype()) : direct;
}

void CachedRows::finish(const ConstTensorView& rows, const TensorView& out) const {
  if (rows.data() == out.data()) return;
  const std::size_t row_bytes = static_cast<std::size_t>(out.size(2)) * size_of(out.dtype());
  for (std::int64_t b = 0; b < tokens_.batch; ++b) {
    const std::int64_t begin = offsets_[static_cast<std::size_t>(b)];
    const std::int64_t count = tokens_.count(b);
    const TensorView sequence = out.select(0, b);
    copy(rows.slice(0, begin, begin + count), sequence.slice(0, 0, count));
    for (std::int64_t t = count; t < out.size(1); ++t) {
      std::memset(sequence.select(0, t).data(), 0, row_bytes);
    }
  }
}

}  // namespace ladon
