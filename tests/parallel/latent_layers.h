// LatentAttention layers, for tests over ranks.
#pragma once

#include <cstdint>
#include <vector>

#include "ladon/latent_attention.h"
#include "parallel/layer_support.h"

namespace ladon::test {

inline constexpr std::int64_t kEmbed = 29;  // no number of ranks divides it
inline constexpr std::int64_t kQueryRank = 11;

/// Queries of low rank and direct ones, with biases and without, with rope and without, f32 and
/// bf16.
inline std::vector<LatentAttentionOptions> layer_options(int ranks) {
  LatentAttentionOptions options{.embed_dim = kEmbed,
                                 .num_heads = 2 * ranks,
                                 .query_rank = kQueryRank,
                                 .kv_rank = 14,
                                 .nope_dim = 6,
                                 .rope_dim = 4,
                                 .value_dim = 5,
                                 .query_bias = true,
                                 .kv_bias = true,
                                 .out_bias = true,
                                 .causal = true};
  std::vector<LatentAttentionOptions> all{options};
  options.query_rank = 0;
  options.query_bias = options.kv_bias = options.out_bias = false;
  options.dtype = DType::kBF16;
  all.push_back(options);
  options.dtype = DType::kF32;
  options.rope_dim = 0;
  options.kv_norm = false;
  all.push_back(options);
  return all;
}

inline LatentAttention whole_layer(const LatentAttentionOptions& options) {
  LatentAttention layer(options, 5);
  randomise_vectors(layer);
  return layer;
}

inline constexpr LatentForm kForms[] = {LatentForm::kAuto, LatentForm::kExpanded,
                                        LatentForm::kAbsorbed};

}  // namespace ladon::test
