// What the caches of MHA, GQA, MQA and MLA need for one model, side by side.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "ladon/export.h"
#include "ladon/kv_format.h"

namespace ladon {

/// A model, and how much of it is to be cached.
struct CacheMemoryOptions {
  std::int64_t length = 0;  // tokens of each sequence
  std::int64_t batch = 1;
  std::int64_t num_layers = 1;
  KvFormat format{};
  std::int64_t num_heads = 0;
  std::int64_t head_dim = 0;
  std::int64_t value_dim = 0;     // 0: head_dim
  std::int64_t num_kv_heads = 0;  // of GQA; 0: no such row
  std::int64_t kv_rank = 0;       // of MLA; 0: no such row
  std::int64_t rope_dim = 0;      // of MLA
};

struct CacheMemory {
  std::string_view kind;  // "MHA", "GQA", "MQA" or "MLA"
  std::int64_t elements = 0;
  std::int64_t bytes = 0;  // with the scales of i8 and f8e4m3
  /// 1 - elements / MHA's elements; 0 when empty.
  double reduction = 0;
};

/// Rows in the order MHA, GQA, MQA, MLA, those that the options describe. Length, batch
/// and num_layers may be 0. Throws Error for sizes that are negative, or too large to count.
LADON_API std::vector<CacheMemory> compare_cache_memory(const CacheMemoryOptions& options);

}  // namespace ladon
