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
  CachedHeads(const Context& context, const LatentHeads& heads, const CachedCall& call,
              const CachedTokens& tokens, const ConstTensorView& x, KvCache& cache,
              const TensorView& out);

  /// Writes the new latents to the cache, without making them part of it yet, and attends.
  void run(KvCache& cache);
  /// Rows of all new tokens: [rows, heads * value_dim], and where their outputs go.
  const TensorView& attended() const { return temporaries_->attended; }
  const TensorView& output() const { return temporaries_->rows.output(); }
  /// When the outputs are there.
  void commit(const TensorView& out);

 private:
  /// Rows of all new tokens, and of those that take the absorbed form.
  struct Temporaries {
    Temporaries(Arena& arena, const CachedTokens& tokens, std::int64_t absorbed_rows,
                const Steps& steps, const LatentHeads& heads, DType stored,
                const ConstTensorView& x, const CachedCall& call, const TensorView& out);

    TokenRows rows;
    TensorView queries, low, latents, attended;
    TensorView summed;    // absorbed queries, as they are summed
    TensorView absorbed;  // the same as attention takes them
    TensorView sums;      // weighted sums of latents
  };

  bool is_absorbed(std::int64_t sequence, std::int64_t kv_len) const {
    return heads_.form_for(tokens_.count(sequence), kv_len) == LatentForm::kAbsorbed;
  }
  std::int64_t count_absorbed(const KvCache& cache) const;
  std::int64_t row_of(std::int64_t sequence) const {
    return lists_->offsets[static_cast<std::size_t>(sequence)];
  }
  void attend_all(const KvCacheView& cache) const;
  AttentionOptions options_for(const KvCacheView& cache, std::int64_t first,
                               std::int64_t end) const;
  void attend_absorbed(const KvCacheView& cache, std::int64_t first, std::int64_t end,
                       std::int64_t row) const;
  void attend_expanded(const KvCacheView& cache, std::int64_t sequence) const;

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
