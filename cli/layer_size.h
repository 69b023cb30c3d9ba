// The layers that `ladon compare` compares: one size, four ways to attend.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ladon/attention_layer.h"

namespace ladon::cli {

/// A layer's dimensions. Those of MLA that a model does not have are in DeepSeek's proportions.
struct LayerSize {
  std::string_view name;
  std::int64_t embed_dim = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;  // of GQA
  std::int64_t head_dim = 0;
  std::int64_t query_rank = 0;  // of MLA, as are the next two
  std::int64_t kv_rank = 0;
  std::int64_t rope_dim = 0;
};

std::span<const LayerSize> layer_sizes();
/// Throws UsageError that names those there are.
const LayerSize& layer_size(std::string_view name);

/// One way to attend, as a layer of that size.
struct LayerVariant {
  std::string_view kind;          // "MHA", "GQA", "MQA" or "MLA"
  std::int64_t num_kv_heads = 0;  // 0 for MLA
};
std::vector<LayerVariant> layer_variants(const LayerSize& size);
/// "8 KV heads", "latent 512 + 64".
std::string describe(const LayerSize& size, const LayerVariant& variant);

/// Random weights, causal, with rope; in eval mode.
std::unique_ptr<AttentionLayer> make_layer(const LayerSize& size, const LayerVariant& variant,
                                           DType dtype);

/// Elements of the weights, before the layer is made.
double weight_elements(const LayerSize& size, const LayerVariant& variant);
/// Elements that the cache holds for a token.
double cache_elements(const LayerSize& size, const LayerVariant& variant);

}  // namespace ladon::cli
