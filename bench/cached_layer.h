// CachedLayer: an attention layer that runs prompts and single tokens over a cache.
#pragma once

#include <cstdint>
#include <memory>

#include "ladon/attention_layer.h"
#include "ladon/context.h"
#include "ladon/kv_cache.h"
#include "ladon/tensor.h"

namespace ladon::bench {

struct LayerLengths {
  std::int64_t batch = 1;
  std::int64_t prompt = 0;   // tokens of a prefill; 0: none is run
  std::int64_t context = 0;  // tokens in the cache while decoding; 0: nothing is decoded
};

/// The largest error that a layer of this dtype may have, of the largest number of the truth.
double layer_tolerance(DType dtype);

/// Useful flops of `query_len` new tokens of one sequence, its kv_len keys included: projections,
/// and attention in the form that the layer takes. Causal.
double layer_flops(const AttentionLayer& layer, std::int64_t query_len, std::int64_t kv_len);

/// A causal layer with its cache and inputs, which are random. One sequence's prompt and tokens are
/// two jobs: run_prompt() leaves the prompt in the cache, fill_cache() makes it ready for tokens.
class CachedLayer {
 public:
  CachedLayer(const Context& context, std::unique_ptr<AttentionLayer> layer,
              const LayerLengths& lengths);

  void run_prompt(const Context& context);
  /// One more token for each sequence, which is then forgotten.
  void run_token(const Context& context);
  /// The cache as long as the context, with random keys and values.
  void fill_cache(const Context& context);

  /// The first rows of the prompt, computed apart, and its last one, over the kernels' own cache,
  /// against Isa::kReference.
  double prompt_error(const Context& context);
  /// After fill_cache().
  double token_error(const Context& context);

  double prompt_flops() const;
  double token_flops() const;
  double weight_count() const { return static_cast<double>(layer_->parameter_count()); }
  double weight_bytes() const;
  /// All weights and the cache: what a token must read. While the cache is as long as the context.
  double token_bytes() const { return weight_bytes() + static_cast<double>(cache_.bytes_used()); }
  /// While the cache is as long as the context.
  double cache_bytes_per_token() const;
  /// Against MHA's, while the cache holds something.
  double cache_reduction() const { return cache_.reduction(); }

 private:
  class OnHost;

  void truncate(std::int64_t length);
  /// One more token by the reference, on the host; it stays in the cache where that is there too.
  Tensor expected_token(const Context& context, const Context& reference, const Tensor& x);

  std::unique_ptr<AttentionLayer> layer_;
  LayerLengths lengths_;
  KvCache cache_;
  Tensor prompt_, token_, prompt_out_, token_out_;
};

}  // namespace ladon::bench
