// Forward of MultiHeadAttention over a KvCache. The tokens of all sequences are one list of rows,
// whatever their lengths, so that projections waste nothing on padding. Temporaries live in one
// workspace of the Context: decoding allocates nothing.

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <span>
#include <string>

#include "attention/validate.h"
#include "core/attention_params.h"
#include "core/checks.h"
#include "core/context_impl.h"
#include "core/fail.h"
#include "core/integer.h"
#include "core/workspace.h"
#include "layers/multi_head.h"
#include "layers/projection.h"

namespace ladon {

using namespace multi_head;

namespace {

constexpr std::string_view kOperation = "MultiHeadAttention::forward";

/// The new tokens of a call.
struct Tokens {
  std::int64_t batch = 0;
  std::int64_t seq = 0;    // of each sequence, where all have the same
  std::int64_t total = 0;  // of all sequences
  bool packed = false;     // x has the tokens of all sequences one after the other
  std::span<const std::int64_t> lengths;

  std::int64_t count(std::int64_t sequence) const {
    return lengths.empty() ? seq : lengths[static_cast<std::size_t>(sequence)];
  }
  /// x has rows that are padding.
  bool padded() const { return !packed && total != batch * seq; }
};

Tokens check_tokens(const MultiHeadAttention& layer, const ConstTensorView& x, const KvCache& cache,
                    const CachedCall& call) {
  const NamedView argument{"x", x};
  check_present(kOperation, argument);
  if (x.rank() != 2 && x.rank() != 3) {
    fail(kOperation, "x", got_shape(x) + ", expected [batch, seq, embed_dim] or [seq, embed_dim]");
  }
  check_view(kOperation, argument, x.rank());
  check_dtype(kOperation, argument, layer.dtype());
  if (x.size(x.rank() - 1) != layer.embed_dim()) {
    fail(kOperation, "x",
         got_shape(x) + ", expected a width of " + std::to_string(layer.embed_dim()));
  }
  Tokens tokens;
  tokens.batch = cache.batch();
  tokens.lengths = call.new_lengths;
  tokens.packed = x.rank() == 2;
  tokens.seq = x.size(x.rank() - 2);
  const std::int64_t given = tokens.packed ? tokens.batch : x.size(0);
  if (given != tokens.batch || (tokens.packed && tokens.lengths.empty() && tokens.batch != 1)) {
    fail(kOperation, "x",
         got_shape(x) + ", expected a batch of " + std::to_string(tokens.batch) +
             " as the cache has");
  }
  if (!tokens.lengths.empty() && static_cast<std::int64_t>(tokens.lengths.size()) != tokens.batch) {
    fail(kOperation, "new_lengths",
         "got " + std::to_string(tokens.lengths.size()) + " lengths, expected " +
             std::to_string(tokens.batch) + ": one for each sequence of the cache");
  }
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t count = tokens.count(b);
    if (count < 0 || count > tokens.seq) {
      fail(kOperation, "new_lengths",
           "got " + std::to_string(count) + " at index " + std::to_string(b) +
               ", expected 0 to x's " + std::to_string(tokens.seq) + " tokens");
    }
    tokens.total += count;
    if (tokens.packed && tokens.total > tokens.seq) break;
  }
  if (tokens.packed && tokens.total != tokens.seq) {
    fail(kOperation, "new_lengths",
         "got a sum other than x's " + std::to_string(tokens.seq) +
             " tokens, expected the packed tokens of all sequences");
  }
  return tokens;
}

void check_cache(const MultiHeadAttention& layer, const KvCache& cache) {
  const MultiHeadAttentionOptions& options = layer.options();
  const KvCacheOptions& held = cache.options();
  if (held.num_kv_heads != options.num_kv_heads || held.head_dim != options.head_dim ||
      held.value_dim != options.head_dim) {
    const auto text = [](std::int64_t heads, std::int64_t dim, std::int64_t value_dim) {
      return std::to_string(heads) + " KV heads of " + std::to_string(dim) + " and " +
             std::to_string(value_dim);
    };
    fail(kOperation, "cache",
         "got one of " + text(held.num_kv_heads, held.head_dim, held.value_dim) +
             ", expected the layer's " +
             text(options.num_kv_heads, options.head_dim, options.head_dim));
  }
  if (held.dtype == DType::kF64 && options.dtype != DType::kF64) {
    fail(kOperation, "cache",
         std::string("got dtype f64, expected a narrower one for a layer of ") +
             name_of(options.dtype));
  }
  if (options.window_left.value_or(kNoWindow) > cache.window_left()) {
    fail(kOperation, "cache",
         "got a window of " + std::to_string(cache.window_left()) + ", expected " +
             (options.window_left.has_value()
                  ? "at least the layer's " + std::to_string(*options.window_left)
                  : "one that keeps every token, because the layer has no window_left"));
  }
  if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
    fail(kOperation, "cache",
         "got one for a layer of cross-attention, expected key_dim and value_input_dim to be "
         "embed_dim");
  }
  if (layer.is_training() && options.dropout > 0) {
    fail(kOperation, "cache", "got one while the layer trains with dropout, expected eval() first");
  }
}

/// Rows that come out of one workspace.
class Rows {
 public:
  Rows(const Context& context, const MultiHeadAttention& layer, const Tokens& tokens)
      : element_(size_of(layer.dtype())),
        dtype_(layer.dtype()),
        workspace_(context.impl().workspaces(), bytes(layer, tokens)) {
    positions = take<std::int64_t>(tokens.total);
    offsets = take<std::int64_t>(tokens.batch + 1);
    counts = take<std::int64_t>(tokens.batch);
    std::int64_t row = 0;
    for (std::int64_t b = 0; b < tokens.batch; ++b) {
      offsets[static_cast<std::size_t>(b)] = row;
      counts[static_cast<std::size_t>(b)] = tokens.count(b);
      row += tokens.count(b);
    }
    offsets.back() = row;
  }

  /// [rows, width], content unspecified.
  TensorView matrix(std::int64_t rows, std::int64_t width) {
    return {take_bytes(static_cast<std::size_t>(rows * width) * element_), dtype_, {rows, width}};
  }

  std::span<std::int64_t> positions;  // of each row
  std::span<std::int64_t> offsets;    // first row of each sequence
  std::span<std::int64_t> counts;     // rows of each sequence

 private:
  static constexpr std::size_t kAlignment = 64;
  static constexpr std::size_t kPieces = 9;  // each rounded up

  static std::size_t bytes(const MultiHeadAttention& layer, const Tokens& tokens) {
    // q, k, v and what they attend to; x and out, where their rows do not lie side by side.
    const std::int64_t width =
        2 * (layer.num_heads() + layer.num_kv_heads()) * layer.head_dim() + 2 * layer.embed_dim();
    const auto rows = static_cast<std::size_t>(tokens.total);
    return saturating_product(rows, static_cast<std::size_t>(width) * size_of(layer.dtype())) +
           sizeof(std::int64_t) * (rows + 2 * static_cast<std::size_t>(tokens.batch) + 1) +
           kPieces * kAlignment;
  }

  std::byte* take_bytes(std::size_t size) {
    std::byte* const data = workspace_.data() + used_;
    used_ += round_up(size, kAlignment);
    return data;
  }
  template <class Element>
  std::span<Element> take(std::int64_t count) {
    const auto size = static_cast<std::size_t>(count);
    return {reinterpret_cast<Element*>(take_bytes(size * sizeof(Element))), size};
  }

  std::size_t element_;
  DType dtype_;
  Workspace workspace_;
  std::size_t used_ = 0;
};

/// The tokens of a padded x, row after row; or the way back, which fills the padding with zeros.
void gather(const ConstTensorView& x, const Tokens& tokens, const Rows& rows,
            const TensorView& to) {
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t begin = rows.offsets[static_cast<std::size_t>(b)];
    copy(x.select(0, b).slice(0, 0, tokens.count(b)), to.slice(0, begin, begin + tokens.count(b)));
  }
}
void scatter(const ConstTensorView& from, const Tokens& tokens, const Rows& rows,
             const TensorView& out) {
  const std::size_t row_bytes = static_cast<std::size_t>(out.size(2)) * size_of(out.dtype());
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t begin = rows.offsets[static_cast<std::size_t>(b)];
    const TensorView sequence = out.select(0, b);
    copy(from.slice(0, begin, begin + tokens.count(b)), sequence.slice(0, 0, tokens.count(b)));
    for (std::int64_t t = tokens.count(b); t < out.size(1); ++t) {
      std::memset(sequence.select(0, t).data(), 0, row_bytes);
    }
  }
}

/// [rows, heads * head_dim] as [1, rows, heads, head_dim].
TensorView heads_of(const TensorView& rows, std::int64_t heads) {
  return rows.reshape({1, rows.size(0), heads, rows.size(1) / heads});
}

}  // namespace

void MultiHeadAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                                 const CachedCall& call, const TensorView& out) const {
  const Tokens tokens = check_tokens(*this, x, cache, call);
  check_cache(*this, cache);
  check_tensor(kOperation, {"out", out}, dtype(), x.shape());
  const NamedView outputs[] = {{"out", out}};
  const NamedView inputs[] = {{"x", x}, {"mask", call.mask}, {"bias", call.bias}};
  check_no_overlap(kOperation, outputs, inputs);
  const KvCacheView before = cache.view();
  check_apart(kOperation, outputs[0], {"cache", cache_keys(before)});
  check_apart(kOperation, outputs[0], {"cache", cache_values(before)});

  if (tokens.batch == 0) return;

  const Pass pass(context, *this);
  Rows rows(context, *this, tokens);
  for (std::int64_t b = 0; b < tokens.batch; ++b) {
    const std::int64_t begin = rows.offsets[static_cast<std::size_t>(b)];
    for (std::int64_t t = 0; t < tokens.count(b); ++t) {
      rows.positions[static_cast<std::size_t>(begin + t)] = cache.length(b) + t;
    }
  }
  ConstTensorView input = tokens.padded() ? ConstTensorView() : as_rows(x);
  if (input.absent()) {
    const TensorView gathered = rows.matrix(tokens.total, embed_dim());
    gather(x, tokens, rows, gathered);
    input = gathered;
  }
  const auto project_heads = [&](std::string_view weight, std::string_view bias,
                                 std::int64_t heads) {
    const TensorView y = rows.matrix(tokens.total, heads * head_dim());
    project(context, input, pass.weight(weight), pass.weight(bias), y);
    return heads_of(y, heads);
  };
  const TensorView q = project_heads("q_proj.weight", "q_proj.bias", num_heads());
  const TensorView k = project_heads("k_proj.weight", "k_proj.bias", num_kv_heads());
  const TensorView v = project_heads("v_proj.weight", "v_proj.bias", num_kv_heads());
  const RopePositions positions{.explicit_positions = rows.positions};
  pass.place(q, "q_norm.weight", positions);
  pass.place(k, "k_norm.weight", positions);

  KvAppend appended(cache, k, v, rows.counts);
  AttentionOptions options = pass.attention_options(call.causal);
  options.mask = call.mask;
  options.bias = call.bias;
  options.query_offsets = rows.offsets;
  const TensorView attended = rows.matrix(tokens.total, num_heads() * head_dim());
  attention(context, q, appended.view(), options, heads_of(attended, num_heads()));

  TensorView result = tokens.padded() ? TensorView() : as_rows(out);
  const bool direct = !result.absent();
  if (!direct) result = rows.matrix(tokens.total, embed_dim());
  project(context, attended, pass.weight("out_proj.weight"), pass.weight("out_proj.bias"), result);
  if (!direct) scatter(result, tokens, rows, out);
  appended.commit();
}

}  // namespace ladon
