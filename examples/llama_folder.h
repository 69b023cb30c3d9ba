// Model folders of the Llama kind with random weights, to try things out on.
#pragma once

#include <ladon/ladon.h>

#include <cstdint>
#include <filesystem>

/// The small default is for tests. Sizes of Llama 3 8B: 4096 wide, 32 heads on 8, theta 500000.
struct LlamaShape {
  std::int64_t layers = 2;
  std::int64_t embed_dim = 64;
  std::int64_t num_heads = 4;
  std::int64_t num_kv_heads = 2;
  std::int64_t hidden = 160;
  std::int64_t vocabulary = 300;
  double rope_theta = 10000;
  ladon::DType dtype = ladon::DType::kF32;
  /// 0: keys and values have no structure. Otherwise they have one that conversions can find, under
  /// noise of a tenth of their size:
  /// - the fast rope pairs (5 of 8) of all KV heads are complex multiples of one;
  /// - the others, and the values, are of `planted_rank` together;
  /// - there are `planted_heads` KV heads at most: head n is head n modulo that, but for a phase of
  ///   each rope pair and an invertible map of the values.
  std::int64_t planted_rank = 0;
  std::int64_t planted_heads = 8;
};

/// Writes config.json and model.safetensors.
void make_llama(const ladon::Context& context, const std::filesystem::path& folder,
                const LlamaShape& shape);
