#include "layer_size.h"

#include <array>
#include <string>
#include <vector>

#include "failure.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "names.h"

namespace ladon::cli {
namespace {

//                                      embed heads KV  dim  ranks      rope
constexpr std::array<LayerSize, 5> kSizes{{{"tiny", 64, 4, 2, 16, 0, 32, 8},
                                           {"small", 1024, 16, 4, 64, 384, 256, 32},
                                           {"llama-3-8b", 4096, 32, 8, 128, 1536, 512, 64},
                                           {"llama-3-70b", 8192, 64, 8, 128, 1536, 512, 64},
                                           {"deepseek-v3", 7168, 128, 8, 128, 1536, 512, 64}}};

constexpr std::uint64_t kSeed = 1;

}  // namespace

std::span<const LayerSize> layer_sizes() { return kSizes; }

const LayerSize& layer_size(std::string_view name) {
  std::vector<std::string> names;
  std::string list;
  for (const LayerSize& size : kSizes) {
    if (size.name == name) return size;
    names.emplace_back(size.name);
    list += (list.empty() ? "" : ", ") + names.back();
  }
  throw UsageError("compare: --size: no size '" + std::string(name) + "'" +
                   did_you_mean(name, names) + "; there are " + list);
}

std::vector<LayerVariant> layer_variants(const LayerSize& size) {
  return {{"MHA", size.num_heads}, {"GQA", size.num_kv_heads}, {"MQA", 1}, {"MLA", 0}};
}

std::string describe(const LayerSize& size, const LayerVariant& variant) {
  if (variant.num_kv_heads == 0) {
    return "latent " + std::to_string(size.kv_rank) + " + " + std::to_string(size.rope_dim);
  }
  return std::to_string(variant.num_kv_heads) +
         (variant.num_kv_heads == 1 ? " KV head" : " KV heads");
}

std::unique_ptr<AttentionLayer> make_layer(const LayerSize& size, const LayerVariant& variant,
                                           DType dtype) {
  std::unique_ptr<AttentionLayer> layer;
  if (variant.num_kv_heads == 0) {
    layer = std::make_unique<LatentAttention>(LatentAttentionOptions{.embed_dim = size.embed_dim,
                                                                     .num_heads = size.num_heads,
                                                                     .query_rank = size.query_rank,
                                                                     .kv_rank = size.kv_rank,
                                                                     .nope_dim = size.head_dim,
                                                                     .rope_dim = size.rope_dim,
                                                                     .causal = true,
                                                                     .dtype = dtype},
                                              kSeed);
  } else {
    layer = std::make_unique<MultiHeadAttention>(
        MultiHeadAttentionOptions{.embed_dim = size.embed_dim,
                                  .num_heads = size.num_heads,
                                  .num_kv_heads = variant.num_kv_heads,
                                  .head_dim = size.head_dim,
                                  .causal = true,
                                  .rope = RopeOptions{},
                                  .dtype = dtype},
        kSeed);
  }
  layer->eval();
  return layer;
}

double weight_elements(const LayerSize& size, const LayerVariant& variant) {
  const auto embed = static_cast<double>(size.embed_dim);
  const auto all_heads = static_cast<double>(size.num_heads * size.head_dim);
  if (variant.num_kv_heads != 0) {
    return 2 * embed * (all_heads + static_cast<double>(variant.num_kv_heads * size.head_dim));
  }
  const auto query = static_cast<double>(size.num_heads * (size.head_dim + size.rope_dim));
  const auto query_rank = static_cast<double>(size.query_rank);
  const auto kv_rank = static_cast<double>(size.kv_rank);
  return (query_rank == 0 ? embed * query : query_rank * (embed + query)) +
         embed * (kv_rank + static_cast<double>(size.rope_dim)) + 2 * kv_rank * all_heads +
         embed * all_heads;
}

double cache_elements(const LayerSize& size, const LayerVariant& variant) {
  return static_cast<double>(variant.num_kv_heads == 0 ? size.kv_rank + size.rope_dim
                                                       : 2 * variant.num_kv_heads * size.head_dim);
}

}  // namespace ladon::cli
