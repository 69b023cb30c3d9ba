// How much memory caches take, and what would fit: the arithmetic behind `ladon plan`.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "ladon/dtype.h"
#include "model_shape.h"

namespace ladon::cli {

/// How a model's keys and values would be kept: as they are, or in another way.
struct CacheVariant {
  std::string_view kind;  // "MHA", "GQA", "MQA" or "MLA"
  bool own = false;       // it is how the model does it: its windows count
  std::int64_t num_kv_heads = 0;
  std::int64_t kv_rank = 0;  // of MLA
  std::int64_t rope_dim = 0;
};

/// MHA, GQA, MQA, MLA. Where a model does not say, GQA has 8 KV heads (and is left out where 8 do
/// not divide its heads), and MLA DeepSeek's proportions: a latent of 4 heads and a rope part of
/// half a head.
std::vector<CacheVariant> cache_variants(const ModelShape& model);

struct CacheRequest {
  std::int64_t context = 0;
  std::int64_t batch = 1;
  DType dtype = DType::kBF16;
};

/// Bytes of all layers. Throws Error where they are too many to count.
std::int64_t cache_bytes(const ModelShape& model, const CacheVariant& variant,
                         const CacheRequest& request);

/// The most tokens for each sequence, or the most sequences, that fit into `memory`; the rest of
/// the request is kept. Empty: any number (every layer has a window).
std::optional<std::int64_t> most_context(const ModelShape& model, const CacheVariant& variant,
                                         CacheRequest request, std::int64_t memory);
std::optional<std::int64_t> most_batch(const ModelShape& model, const CacheVariant& variant,
                                       CacheRequest request, std::int64_t memory);

}  // namespace ladon::cli
