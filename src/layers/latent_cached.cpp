// Forward of LatentAttention over a KvCache of latents. Each sequence takes the form that costs
// less for its own lengths: absorbed for a few tokens over a long past, which reads the latents in
// place; expanded for a long chunk, which makes keys and values of the sequence's latents, one
// sequence at a time. Neighbours with the same form go together.

#include "layers/latent_cached.h"

#include <algorithm>
#include <string>

#include "attention/attend.h"
#include "cache/gather.h"
#include "core/fail.h"

namespace ladon {
namespace latent {
namespace {

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

/// The first row of each sequence of a part of the batch. Host memory.
struct PartOffsets {
  PartOffsets(Arena& arena, std::int64_t batch) : offsets(arena.take<std::int64_t>(batch + 1)) {}
  std::int64_t* offsets;
};

/// All of a sequence's latents.
struct SequenceLatents {
  SequenceLatents(Arena& arena, const LatentHeads& heads, std::int64_t length)
      : latents(arena.take_rows(length, heads.latent_dim(), heads.dtype())) {}
  TensorView latents;
};

/// The keys and values that they expand to.
struct ExpandedSequence {
  ExpandedSequence(Arena& arena, const LatentHeads& heads, std::int64_t length)
      : keys(arena.take_rows(length, heads.num_heads() * heads.head_dim(), heads.dtype())),
        values(arena.take_rows(length, heads.num_heads() * heads.value_dim(), heads.dtype())) {}

  TensorView keys, values;
};

}  // namespace

CachedHeads::Temporaries::Temporaries(Arena& arena, const CachedHeads& call,
                                      const ConstTensorView& x, DType stored, const TensorView& out)
    : rows(arena, call.tokens_, x, call.call_, out) {
  const LatentHeads& heads = call.heads_;
  const Steps& steps = call.steps_;
  const std::int64_t absorbed_rows = call.count_absorbed();
  const std::int64_t count = heads.num_heads();
  const auto take = [&](std::int64_t width) {
    return arena.take_rows(call.tokens_.total, width, heads.dtype());
  };
  queries = take(count * heads.head_dim());
  if (steps.low_rank()) low = take(heads.query_rank());
  latents = take(heads.latent_dim());
  attended = take(count * heads.value_dim());
  const DType compute = steps.compute_dtype();
  const DType dtype = steps.absorbed_dtype(stored);
  summed = arena.take_rows(absorbed_rows, count * heads.latent_dim(), compute);
  absorbed =
      dtype == compute ? summed : arena.take_rows(absorbed_rows, count * heads.latent_dim(), dtype);
  sums = arena.take_rows(absorbed_rows, count * heads.kv_rank(), dtype);
}

CachedHeads::CachedHeads(const Context& context, const LatentHeads& heads, const CachedCall& call,
                         const CachedTokens& tokens, const ConstTensorView& x, DType stored,
                         const TensorView& out)
    : context_(context),
      heads_(heads),
      steps_(context, heads),
      call_(call),
      tokens_(tokens),
      lists_(context.impl().host_scratch(), tokens),
      temporaries_(backend_of(context).scratch(), *this, x, stored, out) {
  lists_->fill(tokens);
}

void CachedHeads::project() {
  const Temporaries& t = *temporaries_;
  const TokenRows::Inputs inputs = t.rows.inputs(context_, tokens_, *lists_);
  if (steps_.low_rank()) {
    steps_.project_low(inputs.queries, t.low);
    steps_.norm_low(t.low, t.low);
    steps_.project_queries(t.low, t.queries);
  } else {
    steps_.project_queries(inputs.queries, t.queries);
  }
  steps_.rotate_queries(t.queries, 0, {.explicit_positions = lists_->query_positions});
  steps_.project_latents(inputs.tokens, t.latents);
  steps_.norm_latents(t.latents, t.latents);
  steps_.rotate_latents(t.latents, 0, {.explicit_positions = lists_->positions});
}

ConstTensorView CachedHeads::latents() const {
  return head_columns(temporaries_->latents, 0, 1, 0, heads_.latent_dim());
}

void CachedHeads::run(KvCache& cache) {
  project();
  appended_.emplace(context_, cache, latents(), ConstTensorView(), lists_->counts);
  const KvCacheView view = appended_->view();
  for_each_absorbed([&](const AbsorbedRun& run) { attend_absorbed(view, run); });
  for (std::int64_t b = 0; b < tokens_.batch; ++b) {
    if (is_absorbed(b) || tokens_.count(b) == 0) continue;
    const InWorkspace<SequenceLatents> all(backend_of(context_).scratch(), heads_,
                                           tokens_.length(b));
    gather_sequence(context_, view, static_cast<std::size_t>(b), all->latents, {});
    attend_expanded(b, all->latents);
  }
}

void CachedHeads::finish(const TensorView& out) const {
  temporaries_->rows.finish(context_, tokens_, *lists_, out);
}

void CachedHeads::commit(const TensorView& out) {
  finish(out);
  appended_->commit();
}

std::int64_t CachedHeads::count_absorbed() const {
  std::int64_t rows = 0;
  for (std::int64_t b = 0; b < tokens_.batch; ++b) {
    if (is_absorbed(b)) rows += tokens_.count(b);
  }
  return rows;
}

template <class Body>
void CachedHeads::for_each_absorbed(const Body& body) const {
  std::int64_t row = 0;
  for (std::int64_t first = 0; first < tokens_.batch;) {
    std::int64_t end = first;
    while (end < tokens_.batch && is_absorbed(end)) ++end;
    if (end > first) {
      body({first, end, row});
      row += row_of(end) - row_of(first);
    }
    first = end + 1;
  }
}

void CachedHeads::absorb() const {
  for_each_absorbed([&](const AbsorbedRun& run) { absorb(run); });
}

void CachedHeads::apply() const {
  for_each_absorbed([&](const AbsorbedRun& run) { apply(run); });
}

AttentionOptions CachedHeads::options_for(std::int64_t first, std::int64_t end) const {
  std::int64_t query_len = 0;
  std::int64_t kv_len = 0;
  for (std::int64_t b = first; b < end; ++b) {
    query_len = std::max(query_len, tokens_.count(b));
    kv_len = std::max(kv_len, tokens_.length(b));
  }
  AttentionOptions options = steps_.attention_options(call_.causal);
  options.mask = part_of(call_.mask, first, end, query_len, kv_len);
  options.bias = part_of(call_.bias, first, end, query_len, kv_len);
  return options;
}

void CachedHeads::absorb(const AbsorbedRun& run) const {
  const Temporaries& t = *temporaries_;
  const TensorView summed = rows_of(t.summed, run);
  const TensorView absorbed = rows_of(t.absorbed, run);
  steps_.absorb_queries(t.queries.slice(0, row_of(run.first), row_of(run.end)), summed);
  if (absorbed.dtype() != summed.dtype()) copy(context_, summed, absorbed);
}

void CachedHeads::apply(const AbsorbedRun& run) const {
  const Temporaries& t = *temporaries_;
  steps_.apply_values(rows_of(t.sums, run),
                      t.attended.slice(0, row_of(run.first), row_of(run.end)));
}

void CachedHeads::attend_absorbed(const KvCacheView& cache, const AbsorbedRun& run) const {
  const InWorkspace<PartOffsets> part_offsets(context_.impl().host_scratch(), run.end - run.first);
  for (std::int64_t b = run.first; b <= run.end; ++b) {
    part_offsets->offsets[b - run.first] = row_of(b) - row_of(run.first);
  }
  absorb(run);
  const auto count = static_cast<std::size_t>(run.end - run.first);
  KvCacheView part = cache;
  part.sequences = cache.sequences.subspan(static_cast<std::size_t>(run.first), count);
  AttentionOptions options = options_for(run.first, run.end);
  options.query_offsets = {part_offsets->offsets, count + 1};
  const std::int64_t heads = heads_.num_heads();
  attend(context_,
         head_columns(rows_of(temporaries_->absorbed, run), 0, heads, 0, heads_.latent_dim()), part,
         options, head_columns(rows_of(temporaries_->sums, run), 0, heads, 0, heads_.kv_rank()), {},
         {.group = heads_.whole_heads});
  apply(run);
}

void CachedHeads::attend_expanded(std::int64_t sequence, const ConstTensorView& latents) const {
  const std::int64_t begin = row_of(sequence);
  const std::int64_t end = row_of(sequence + 1);
  const Temporaries& t = *temporaries_;
  const InWorkspace<ExpandedSequence> expanded(backend_of(context_).scratch(), heads_,
                                               latents.size(0));
  steps_.expand_keys(latents, expanded->keys);
  steps_.expand_values(latents, expanded->values);
  const std::int64_t heads = heads_.num_heads();
  const auto heads_of = [&](const TensorView& rows, std::int64_t dim) {
    return head_columns(rows, 0, heads, 0, dim);
  };
  attend(context_, heads_of(t.queries.slice(0, begin, end), heads_.head_dim()),
         heads_of(expanded->keys, heads_.head_dim()),
         heads_of(expanded->values, heads_.value_dim()), options_for(sequence, sequence + 1),
         heads_of(t.attended.slice(0, begin, end), heads_.value_dim()));
}

void check_cached_layer(const Operation& operation, const AttentionLayer& layer,
                        const LatentAttentionOptions& options, const KvCache& cache) {
  if (cache.kind() == "window") {
    fail(operation, "cache",
         "got a window of " + std::to_string(cache.window_left()) +
             ", expected one that keeps every token, because the layer has no window");
  }
  if (layer.is_training() && options.dropout > 0) {
    fail(operation, "cache", "got one while the layer trains with dropout, expected eval() first");
  }
}

}  // namespace latent

void LatentAttention::forward(const Context& context, const ConstTensorView& x, KvCache& cache,
                              const CachedCall& call, const TensorView& out) const {
  const Operation operation("LatentAttention::forward", context);
  const CachedTokens tokens = check_cached_call(operation, *this, x, cache, call, out);
  latent::check_cached_layer(operation, *this, options_, cache);
  if (tokens.batch == 0) return;
  latent::CachedHeads heads(context, *this, call, tokens, x, cache.options().format.dtype, out);
  heads.run(cache);
  latent::Steps(context, *this).project_out(heads.attended(), heads.output());
  heads.commit(out);
}

}  // namespace ladon
