// TensorParallelLatentAttention over a SpreadKvCache: heads are shared by ranks, and so are the
// latents of each sequence. Queries travel to the latents in the absorbed form, which multiplies
// them in place; in the expanded form latents travel to the heads, of which each rank makes its own
// keys and values.

#include <optional>
#include <utility>
#include <vector>

#include "core/fail.h"
#include "layers/latent_cached.h"
#include "parallel/spread_call.h"
#include "parallel/tensor_parallel.h"

namespace ladon {

using namespace latent;

namespace {

/// The attended values of one call.
class SpreadHeads {
 public:
  /// `call` is the whole layer's; `own` has this rank's heads.
  SpreadHeads(const Context& context, const LatentHeads& heads, const CachedTokens& tokens,
              const CachedCall& call, SpreadCall& stored, const CachedHeads& own)
      : context_(context),
        heads_(heads),
        tokens_(tokens),
        call_(call),
        stored_(stored),
        own_(own) {}

  void attend(CollectiveCall& ranks, bool reproducible) const {
    attend_absorbed(ranks, reproducible);
    for (std::int64_t b = 0; b < tokens_.batch; ++b) {
      if (own_.is_absorbed(b) || tokens_.count(b) == 0) continue;
      const Tensor latents = stored_.gather_keys(ranks, b, heads_.dtype());
      own_.attend_expanded(b, latents);
      context_.synchronize();  // before the latents are freed
    }
  }

 private:
  void attend_absorbed(CollectiveCall& ranks, bool reproducible) const {
    std::vector<std::int64_t> offsets{0};
    for (std::int64_t b = 0; b < tokens_.batch; ++b) {
      offsets.push_back(offsets.back() + (own_.is_absorbed(b) ? tokens_.count(b) : 0));
    }
    if (offsets.back() == 0) return;
    own_.absorb();
    const std::int64_t all = heads_.whole_heads;
    const Tensor queries =
        gather_columns(context_, ranks, own_.absorbed(), all * heads_.latent_dim());
    AttentionOptions options = Steps(context_, heads_).attention_options(call_.causal);
    options.mask = call_.mask;
    options.bias = call_.bias;
    options.query_offsets = offsets;
    const Tensor sums = stored_.attend_own_heads(
        ranks, head_columns(queries.view(), 0, all, 0, heads_.latent_dim()), options, reproducible);
    copy(context_, sums.view().reshape(own_.sums().shape()), own_.sums());
    own_.apply();
    context_.synchronize();  // before queries and sums are freed
  }

  const Context& context_;
  const LatentHeads& heads_;
  const CachedTokens& tokens_;
  const CachedCall& call_;
  SpreadCall& stored_;
  const CachedHeads& own_;
};

}  // namespace

void TensorParallelLatentAttention::forward(const Context& context, const ConstTensorView& x,
                                            SpreadKvCache& cache, const CachedCall& call,
                                            const TensorView& out,
                                            const SpreadAttentionOptions& spread) const {
  const Operation operation("TensorParallelLatentAttention::forward", context);
  const LatentHeads heads = own_heads();
  SpreadCall stored(context, cache);
  CachedTokens tokens;
  CachedCall own_call;
  std::optional<CachedHeads> own;
  Tensor result;
  run_collective(
      communicator(), operation,
      [&](CallSignature& signature) {
        if (&cache.communicator() != &communicator()) {
          fail(operation, "cache",
               "got one over another communicator, expected one over the layer's");
        }
        tokens = check_cached_call(operation, *this, x, cache.local(), call, out, stored.past());
        check_cached_layer(operation, *this, whole_, cache.local());
        describe(context, signature);
        describe_call(signature, x, tokens, call, whole_.causal);
        stored.describe(signature);
        signature.add("reproducible", std::int64_t{spread.reproducible});
        if (tokens.batch == 0) return;
        own_call = of_heads(call, {first_head_, first_head_ + own_.num_heads});
        own.emplace(context, heads, own_call, tokens, x, cache.options().format.dtype, out);
        own->project();
        // Here, where a rank without space for them can still refuse the call.
        stored.append(operation, own->latents(), {}, own->counts(), signature);
      },
      [&](CollectiveCall& ranks) {
        if (tokens.batch == 0) return;
        SpreadHeads(context, heads, tokens, call, stored, *own).attend(ranks, spread.reproducible);
        const Tensor all =
            gather_columns(context, ranks, own->attended(), whole_.num_heads * whole_.value_dim);
        result = project_out(context, ranks, *this, plan_->out, all);
      },
      [&] {
        if (tokens.batch == 0) return;
        copy(context, result, own->output());
        own->finish(out);
        context.synchronize();
        stored.commit();
      });
}

Tensor TensorParallelLatentAttention::forward(const Context& context, const ConstTensorView& x,
                                              SpreadKvCache& cache, const CachedCall& call,
                                              const SpreadAttentionOptions& spread) const {
  Tensor out;
  if (!x.absent()) out = Tensor::uninitialized(context, dtype(), x.shape());
  // Without x too: all ranks must hear of it.
  forward(context, x, cache, call, x.absent() ? TensorView() : TensorView(out), spread);
  return out;
}

}  // namespace ladon
