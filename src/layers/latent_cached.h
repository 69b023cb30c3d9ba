// A call of LatentAttention over a KvCache of latents, up to the attended values.
#pragma once

#include <optional>

#include "core/context_impl.h"
#include "ladon/kv_cache.h"
#include "layers/cached_tokens.h"
#include "layers/latent_steps.h"

namespace ladon::latent {

/// Refuses a cache that cannot serve this layer.
void check_cached_layer(const Operation& operation, const AttentionLayer& layer,
                        const LatentAttentionOptions& options, const KvCache& cache);

class CachedHeads {
 public:
  /// `stored` is the dtype of the cache.
  CachedHeads(const Context& context, const LatentHeads& heads, const CachedCall& call,
              const CachedTokens& tokens, const ConstTensorView& x, DType stored,
              const TensorView& out);

  /// Writes the new latents to the cache, without making them part of it yet, and attends.
  void run(KvCache& cache);

  // The steps of run(), for a cache of another kind.
  /// Queries and latents of the new tokens; then latents() are there, packed [1, rows, 1, dim].
  void project();
  ConstTensorView latents() const;
  std::span<const std::int64_t> counts() const { return lists_->counts; }
  bool is_absorbed(std::int64_t sequence) const {
    return heads_.form_for(tokens_.count(sequence), tokens_.length(sequence)) ==
           LatentForm::kAbsorbed;
  }
  /// Rows of the sequences that take the absorbed form, one after the other: queries [rows, heads *
  /// latent_dim], made by absorb(), and the sums of latents [rows, heads * kv_rank], of which
  /// apply() makes the attended values.
  const TensorView& absorbed() const { return temporaries_->absorbed; }
  const TensorView& sums() const { return temporaries_->sums; }
  void absorb() const;
  void apply() const;
  /// A sequence that takes the expanded form, with all of its latents, [length, latent_dim].
  void attend_expanded(std::int64_t sequence, const ConstTensorView& latents) const;

  /// Rows of all new tokens: [rows, heads * value_dim], and where their outputs go.
  const TensorView& attended() const { return temporaries_->attended; }
  const TensorView& output() const { return temporaries_->rows.output(); }
  /// When the outputs are there.
  void finish(const TensorView& out) const;
  /// The same, and the new latents become part of the cache.
  void commit(const TensorView& out);

 private:
  /// Rows of all new tokens, and of those that take the absorbed form.
  struct Temporaries {
    Temporaries(Arena& arena, const CachedHeads& call, const ConstTensorView& x, DType stored,
                const TensorView& out);

    TokenRows rows;
    TensorView queries, low, latents, attended;
    TensorView summed;    // absorbed queries, as they are summed
    TensorView absorbed;  // the same as attention takes them
    TensorView sums;      // weighted sums of latents
  };

  /// Neighbours that take the absorbed form: sequences [first, end), whose rows among those that
  /// are absorbed begin at `row`.
  struct AbsorbedRun {
    std::int64_t first = 0;
    std::int64_t end = 0;
    std::int64_t row = 0;
  };

  std::int64_t count_absorbed() const;
  template <class Body>
  void for_each_absorbed(const Body& body) const;
  std::int64_t row_of(std::int64_t sequence) const {
    return lists_->offsets[static_cast<std::size_t>(sequence)];
  }
  AttentionOptions options_for(std::int64_t first, std::int64_t end) const;
  TensorView rows_of(const TensorView& rows, const AbsorbedRun& run) const {
    return rows.slice(0, run.row, run.row + row_of(run.end) - row_of(run.first));
  }
  void absorb(const AbsorbedRun& run) const;
  void apply(const AbsorbedRun& run) const;
  void attend_absorbed(const KvCacheView& cache, const AbsorbedRun& run) const;

  const Context& context_;
  const LatentHeads heads_;
  const Steps steps_;
  const CachedCall& call_;
  const CachedTokens& tokens_;
  InWorkspace<RowLists> lists_;
  InWorkspace<Temporaries> temporaries_;
  std::optional<KvAppend> appended_;
};

}  // namespace ladon::latent
