// What `ladon run` does with a layer, apart from files and words.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "ladon/attention_layer.h"
#include "ladon/checkpoint.h"

namespace ladon::cli {

bool is_causal(const LayerOptions& layer);
/// Keys that a query sees at most, its own the last; 0: all.
std::int64_t window_of(const LayerOptions& layer);
/// Elements of the layer's weights.
double parameter_elements(const LayerOptions& layer);

struct CachedRun {
  std::int64_t chunk = 1;
  std::optional<DType> cache_dtype{};
  std::function<void(std::int64_t tokens)> progress{};  // after each chunk
};

struct LayerResult {
  Tensor out;
  double seconds = 0;
  std::int64_t cache_bytes = 0;  // 0 without a cache
};

/// x is [batch, seq, embed_dim], in the layer's dtype.
LayerResult run_whole(const Context& context, const AttentionLayer& layer, const Tensor& x);
LayerResult run_cached(const Context& context, const AttentionLayer& layer, const Tensor& x,
                       const CachedRun& how);

/// What the layer looks at in one sequence: [num_heads, seq, seq], f32.
Tensor weights_of(const Context& context, const AttentionLayer& layer, const ConstTensorView& x);

}  // namespace ladon::cli
