// Shape: one attention call of the benchmark, described, with its flops and its bytes.
#pragma once

#include <cstdint>
#include <string>

#include "ladon/dtype.h"

namespace ladon::bench {

enum class Pass : std::uint8_t { kForward, kBackward };

/// Where K and V come from.
enum class Source : std::uint8_t {
  kTensors,
  kContiguous,    // a contiguous KvCache
  kPaged,         // a paged one, 16 tokens to a page
  kSharedPrefix,  // a paged one in which all but the last 64 tokens of each sequence are shared
  kLatent,  // a contiguous one of MLA's latents, whose first value_dim elements are the values
};

/// What a call's scores have besides a scale and causal masking.
enum class Rule : std::uint8_t {
  kNone,
  kSoftcap,  // of 30
  kAlibi,
  kMask,     // [1, 1, query_len, kv_len], half of it visible
  kBias,     // [1, num_heads, query_len, kv_len], in the call's dtype
  kDropout,  // of 0.1
};

/// Tokens of a page, and those that a sequence does not share, behind a shared prefix.
inline constexpr std::int64_t kPageSize = 16;
inline constexpr std::int64_t kOwnTokens = 64;

struct Shape {
  Pass pass = Pass::kForward;
  DType dtype = DType::kF32;
  Source source = Source::kTensors;
  DType storage = DType::kF32;  // of a cache
  std::int64_t batch = 1;
  std::int64_t query_len = 2048;
  std::int64_t kv_len = 2048;
  std::int64_t num_heads = 8;
  std::int64_t num_kv_heads = 8;
  std::int64_t head_dim = 128;
  std::int64_t value_dim = 0;  // 0: head_dim
  bool causal = false;
  Rule rule = Rule::kNone;  // forward over tensors alone; kAlibi where it is causal

  /// "f32 forward B1 H8 S2048 D128 full".
  std::string name() const;
  std::int64_t values() const { return value_dim == 0 ? head_dim : value_dim; }
  /// Tokens that are stored: those of a shared prefix count once.
  std::int64_t stored_tokens() const;
  /// Useful flops: 2 * (head_dim + value_dim) for each score forward, 6 * head_dim + 4 * value_dim
  /// backward, of which a causal case needs half. Of latents this is the absorbed form.
  double flops() const;
  /// Bytes of K and V (with their scales), each counted once, however many sequences read it.
  double kv_bytes() const;
};

}  // namespace ladon::bench
