// Forward of LatentAttention over a KvCache of latents. Each sequence takes the form that costs
// less for its own lengths: absorbed for a few tokens over a long past, which reads the latents
// where they lie; expanded for a long chunk, which makes keys and values of the sequence's latents,
// one sequence at a time. Neighbours with the same form go together.

#include <algorithm>
#include <string>

#include "core/element.h"
#include "core/fail.h"
#include "layers/cached_tokens.h"
#include "layers/latent_pass.h"

namespace ladon {

using namespace latent;

namespace {

constexpr std::string_view kOperation = "LatentAttention::forward";

/// The part of a mask or bias for some of the sequences, which may be shorter than others.
ConstTensorView part_of(const ConstTensorView& mask, std::int64_t first, std::int64_t end,
                        std::int64_t query_len, std::int64_t kv_len) {
  if (mask.absent()) return mask;
  ConstTensorView part = mask;
  if (part.size(0) > 1) part = part.slice(0, first, end);
  if (part.size(2) > 1) part = part.slice(2, 0, query_len);
  if (part.size(3) > 1) part = part.slice(3, 0, kv_len);
  return part;
}

/// All latents of a sequence, [1, length, latent_dim], in the layer's dtype.
Tensor latents_of(const KvCacheView& cache, std::size_t sequence, DType dtype) {
  const KvSequenceView& from = cache.sequences[sequence];
  Tensor latents = Tensor::uninitialized(dtype, {1, from.length, cache.head_dim});
  for (std::int64_t j = 0; j < from.length; ++j) {
    const std::int64_t slot =
        cache.page_size != 0
            ? from.pages[j / cache.page_size] * cache.page_size + j % cache.page_size
            : from.first_slot + j;
    const double scale = cache.k_scales == nullptr
                             ? 1
                             : static_cast<double>(cache.k_scales[slot * cache.scale_slot_stride]);
    for (std::int64_t i = 0; i < cache.head_dim; ++i) {
      const double stored = load_element(cache.k, cache.dtype, slot * cache.k_slot_stride + i);
      store_element(latents.data(), dtype, j * cache.head_dim + i, stored * scale);
    }
  }
  return latents;
}

class LatentCached {
 public:
  LatentCached(const Context& context, const LatentAttention& layer, const CachedCall& call,
               const CachedTokens& tokens, const KvCache& cache)
      : context_(context),
        layer_(layer),
        pass_(context, layer),
        call_(call),
        tokens_(tokens),
        absorbed_rows_(count_absorbed(cache)),
        rows_(context, tokens, cache, bytes()) {}

  void run(const ConstTensorView& x, KvCache& cache, const TensorView& out) {
    const ConstTensorView input = rows_.input(x);
    const RopePositions positions{.explicit_positions = rows_.positions()};
    const TensorView queries = take(layer_.num_heads() * layer_.head_dim());
    if (pass_.low_rank()) {
      const TensorView low = take(layer_.query_rank());
      pass_.project_low(input, low);
      pass_.norm_low(low, low);
      pass_.project_queries(low, queries);
    } else {
      pass_.project_queries(input, queries);
    }
    pass_.turn_queries(queries, 0, positions);
    const TensorView latents = take(layer_.latent_dim());
    pass_.project_latents(input, latents);
    pass_.norm_latents(latents, latents);
    pass_.turn_latents(latents, 0, positions);

    KvAppend appended(cache, head_columns(latents, 0, 1, 0, layer_.latent_dim()), {},
                      rows_.counts());
    const TensorView attended = take(layer_.num_heads() * layer_.value_dim());
    attend(appended.view(), queries, attended);
    const TensorView result = rows_.output(out);
    pass_.project_out(attended, result);
    rows_.finish(result, out);
    appended.commit();
  }

 private:
  TensorView take(std::int64_t width) { return rows_.take(tokens_.total, width, layer_.dtype()); }

  bool is_absorbed(std::int64_t sequence, std::int64_t kv_len) const {
    return layer_.form_for(tokens_.count(sequence), kv_len) == LatentForm::kAbsorbed;
  }

  std::int64_t count_absorbed(const KvCache& cache) const {
    std::int64_t rows = 0;
    for (std::int64_t b = 0; b < tokens_.batch; ++b) {
      if (is_absorbed(b, cache.length(b) + tokens_.count(b))) rows += tokens_.count(b);
    }
    return rows;
  }

  std::size_t bytes() const {
    const std::int64_t heads = layer_.num_heads();
    const std::int64_t width = heads * (layer_.head_dim() + layer_.value_dim()) +
                               layer_.query_rank() + layer_.latent_dim() + 2 * layer_.embed_dim();
    CachedTokens absorbed = tokens_;
    absorbed.total = absorbed_rows_;
    return CachedRows::bytes_of_rows(tokens_, width, layer_.dtype()) +
           CachedRows::bytes_of_rows(absorbed, heads * (layer_.latent_dim() + layer_.kv_rank()),
                                     pass_.compute_dtype()) +
           (layer_.dtype() == DType::kBF16
                ? CachedRows::bytes_of_rows(absorbed, heads * layer_.latent_dim(), DType::kBF16)
                : 0) +
           static_cast<std::size_t>(tokens_.batch + 1) * sizeof(std::int64_t);
  }

  void attend(const KvCacheView& cache, const TensorView& queries, const TensorView& attended) {
    const std::int64_t width = layer_.num_heads() * layer_.latent_dim();
    const DType compute = pass_.compute_dtype();
    const DType dtype = pass_.absorbed_dtype(cache.dtype);
    const TensorView summed = rows_.take(absorbed_rows_, width, compute);
    const TensorView absorbed =
        dtype == compute ? summed : rows_.take(absorbed_rows_, width, dtype);
    const TensorView sums =
        rows_.take(absorbed_rows_, layer_.num_heads() * layer_.kv_rank(), dtype);
    const TensorView offsets = rows_.take(tokens_.batch + 1, 1, DType::kI64);
    std::int64_t used = 0;
    for (std::int64_t first = 0; first < tokens_.batch;) {
      const auto kv_len = [&](std::int64_t b) {
        return cache.sequences[static_cast<std::size_t>(b)].length;
      };
      std::int64_t end = first + 1;
      if (!is_absorbed(first, kv_len(first))) {
        attend_expanded(cache, first, queries, attended);
      } else {
        while (end < tokens_.batch && is_absorbed(end, kv_len(end))) ++end;
        const std::int64_t count = row_of(end) - row_of(first);
        attend_absorbed(
            cache, first, end, queries, summed.slice(0, used, used + count),
            absorbed.slice(0, used, used + count), sums.slice(0, used, used + count),
            {static_cast<std::int64_t*>(offsets.data()), static_cast<std::size_t>(end - first + 1)},
            attended);
        used += count;
      }
      first = end;
    }
  }

  std::int64_t row_of(std::int64_t sequence) const {
    return rows_.offsets()[static_cast<std::size_t>(sequence)];
  }

  AttentionOptions options_for(const KvCacheView& cache, std::int64_t first,
                               std::int64_t end) const {
    std::int64_t query_len = 0;
    std::int64_t kv_len = 0;
    for (std::int64_t b = first; b < end; ++b) {
      query_len = std::max(query_len, tokens_.count(b));
      kv_len = std::max(kv_len, cache.sequences[static_cast<std::size_t>(b)].length);
    }
    AttentionOptions options = pass_.attention_options(call_.causal);
    options.mask = part_of(call_.mask, first, end, query_len, kv_len);
    options.bias = part_of(call_.bias, first, end, query_len, kv_len);
    return options;
  }

  void attend_absorbed(const KvCacheView& cache, std::int64_t first, std::int64_t end,
                       const TensorView& queries, const TensorView& summed,
                       const TensorView& absorbed, const TensorView& sums,
                       std::span<std::int64_t> offsets, const TensorView& attended) const {
    for (std::size_t i = 0; i < offsets.size(); ++i) {
      offsets[i] = row_of(first + static_cast<std::int64_t>(i)) - row_of(first);
    }
    pass_.absorb_queries(queries.slice(0, row_of(first), row_of(end)), summed);
    if (absorbed.dtype() != summed.dtype()) copy(summed, absorbed);
    KvCacheView part = cache;
    part.sequences = cache.sequences.subspan(static_cast<std::size_t>(first),
                                             static_cast<std::size_t>(end - first));
    AttentionOptions options = options_for(cache, first, end);
    options.query_offsets = offsets;
    attention(context_, head_columns(absorbed, 0, layer_.num_heads(), 0, layer_.latent_dim()), part,
              options, head_columns(sums, 0, layer_.num_heads(), 0, layer_.kv_rank()));
    pass_.apply_values(sums, attended.slice(0, row_of(first), row_of(end)));
  }

  void attend_expanded(const KvCacheView& cache, std::int64_t sequence, const TensorView& queries,
                       const TensorView& attended) const {
    const std::int64_t begin = row_of(sequence);
    const std::int64_t end = row_of(sequence + 1);
    if (begin == end) return;
    const Tensor latents = latents_of(cache, static_cast<std::size_t>(sequence), layer_.dtype());
    const Tensor keys = layer_.expand_keys(context_, latents);
    const Tensor values = layer_.expand_values(context_, latents);
    const std::int64_t heads = layer_.num_heads();
    attention(context_, head_columns(queries.slice(0, begin, end), 0, heads, 0, layer_.head_dim()),
              keys, values, options_for(cache, sequence, sequence + 1),
              head_columns(attended.slice(0, begin, end), 0, heads, 0, layer_.value_dim()));
  }

  const Context& context_;
  const LatentAttention& layer_;
  const Pass pass_;
  const CachedCall& call_;
  const CachedTokens& tokens_;
  const std::int64_t absorbed_rows_;
  CachedRows rows_;
};

}  // namespace

void LatentAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                              const CachedCall& call, const TensorView& out) const {
  const CachedTokens tokens = check_cached_call(kOperation, *this, x, cache, call, out);
  if (cache.kind() == "window") {
    fail(kOperation, "cache",
         "got a window of " + std::to_string(cache.window_left()) +
             ", expected one that keeps every token, because the layer has no window");
  }
  if (is_training() && options_.dropout > 0) {
    fail(kOperation, "cache", "got one while the layer trains with dropout, expected eval() first");
  }
  if (tokens.batch == 0) return;
  LatentCached(context, *this, call, tokens, cache).run(x, cache, out);
}

}  // namespace ladon
