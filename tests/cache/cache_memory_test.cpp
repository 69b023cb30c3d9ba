// The accounts: what caches say of their size, and the comparison of MHA, GQA, MQA and MLA.

#include <gtest/gtest.h>

#include <cstdio>

#include "cache/cache_support.h"
#include "ladon/cache_memory.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

TEST(CacheMemory, LatentCacheOfASmallLayer) {
  const LatentAttention layer({.embed_dim = 32,
                               .num_heads = 4,
                               .kv_rank = 8,
                               .nope_dim = 8,
                               .rope_dim = 4,
                               .causal = true});
  const Context context;
  const auto pool = std::make_shared<PagePool>(host_context(), layer.cache_options(), 4, 8);
  for (KvCache& cache : std::vector<KvCache>([&] {
         std::vector<KvCache> caches;
         caches.push_back(KvCache::contiguous(host_context(), layer.cache_options()));
         caches.push_back(KvCache::paged(pool));
         return caches;
       }())) {
    EXPECT_EQ(cache.reduction(), 0);
    layer.forward(context, random_tensor(DType::kF32, {10, 32}, 1), cache);
    EXPECT_EQ(cache.length(), 10);
    EXPECT_EQ(cache.elements_used(), 120);
    EXPECT_EQ(cache.bytes_used(), 480);
    EXPECT_EQ(cache.mha_elements(), 640);
    EXPECT_EQ(cache.reduction(), 0.8125);
  }
}

// The layer above with heads of 8 in all, of which 4 with rope.
TEST(CacheMemory, MultiHeadAccountsWithAndWithoutRope) {
  const LatentAttention layer({.embed_dim = 32,
                               .num_heads = 4,
                               .kv_rank = 8,
                               .nope_dim = 4,
                               .rope_dim = 4,
                               .value_dim = 8,
                               .causal = true});
  const Context context;
  KvCacheOptions options = layer.cache_options();
  KvCache by_default = KvCache::contiguous(context, options);
  options.mha_dim = 2 * layer.head_dim();
  KvCache with_rope = KvCache::contiguous(context, options);
  for (KvCache* cache : {&by_default, &with_rope}) {
    layer.forward(context, random_tensor(DType::kF32, {10, 32}, 1), *cache);
    EXPECT_EQ(cache->elements_used(), 120);
  }
  EXPECT_EQ(by_default.mha_elements(), 480);
  EXPECT_EQ(by_default.reduction(), 0.75);
  EXPECT_EQ(with_rope.mha_elements(), 640);
  EXPECT_EQ(with_rope.reduction(), 0.8125);
}

TEST(CacheMemory, LatentCacheOf2048) {
  const LatentAttention layer(
      {.embed_dim = 2048, .num_heads = 16, .kv_rank = 256, .nope_dim = 128, .causal = true});
  KvCache cache = KvCache::contiguous(host_context(), layer.cache_options());
  const Tensor latents(DType::kF32, {1, 1024, 1, 256});
  cache.append(host_context(), latents, {});
  EXPECT_EQ(cache.elements_used(), 262144);
  EXPECT_EQ(cache.mha_elements(), 4194304);
  EXPECT_EQ(cache.reduction(), 0.9375);
}

TEST(CacheMemory, DeepSeekV3) {
  const std::vector<CacheMemory> rows = compare_cache_memory({.length = 4096,
                                                              .batch = 2,
                                                              .num_layers = 61,
                                                              .format = DType::kBF16,
                                                              .num_heads = 128,
                                                              .head_dim = 128,
                                                              .num_kv_heads = 8,
                                                              .kv_rank = 512,
                                                              .rope_dim = 64});
  ASSERT_EQ(rows.size(), 4U);
  const std::int64_t tokens = 4096 * 2 * 61;
  const std::int64_t per_token[] = {128 * 256, 8 * 256, 256, 576};
  const char* const kinds[] = {"MHA", "GQA", "MQA", "MLA"};
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_EQ(rows[i].kind, kinds[i]);
    EXPECT_EQ(rows[i].elements, tokens * per_token[i]);
    EXPECT_EQ(rows[i].bytes, tokens * per_token[i] * 2);
    std::printf("DeepSeek-V3, 2 x 4096 tokens, bf16, %s: %.3f GiB, reduction %.4f\n", kinds[i],
                static_cast<double>(rows[i].bytes) / (1 << 30), rows[i].reduction);
  }
  EXPECT_DOUBLE_EQ(rows[3].reduction, 1 - 576.0 / 32768);
}

TEST(CacheMemory, MultiHeadCachesAndScales) {
  const MultiHeadAttention layer(
      {.embed_dim = 64, .num_heads = 8, .num_kv_heads = 2, .head_dim = 8, .causal = true});
  for (const DType dtype : {DType::kI8, DType::kF8E4M3}) {
    KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(1, dtype), 16);
    const Tensor k = random_tensor(DType::kF32, {1, 5, 2, 8}, 1);
    cache.append(host_context(), k, k);
    EXPECT_EQ(cache.elements_used(), 5 * 2 * 16);
    EXPECT_EQ(cache.bytes_used(), 5 * 2 * (16 + 8));  // a scale for each key and value
    EXPECT_EQ(cache.bytes_reserved(), 16 * 2 * (16 + 8));
    EXPECT_EQ(cache.mha_bytes(), 5 * 8 * (16 + 8));
    EXPECT_EQ(cache.reduction(), 0.75);
    const std::vector<CacheMemory> rows = compare_cache_memory(
        {.length = 5, .format = dtype, .num_heads = 8, .head_dim = 8, .num_kv_heads = 2});
    ASSERT_EQ(rows.size(), 3U);
    EXPECT_EQ(rows[1].bytes, cache.bytes_used());
    EXPECT_EQ(rows[0].bytes, cache.mha_bytes());
  }
}

TEST(CacheMemory, BadSizes) {
  const CacheMemoryOptions good{.length = 8, .num_heads = 8, .head_dim = 8};
  const auto message = [&](auto&& change) {
    CacheMemoryOptions options = good;
    change(options);
    return error_of([&] { compare_cache_memory(options); });
  };
  EXPECT_EQ(message([](CacheMemoryOptions& o) { o.length = -1; }),
            "compare_cache_memory: length: got -1, expected 0 to 281474976710656");
  EXPECT_EQ(message([](CacheMemoryOptions& o) { o.num_heads = 0; }),
            "compare_cache_memory: num_heads: got 0, expected 1 to 281474976710656");
  EXPECT_EQ(message([](CacheMemoryOptions& o) { o.num_kv_heads = 3; }),
            "compare_cache_memory: num_kv_heads: got 3, expected a divisor of num_heads = 8");
  EXPECT_EQ(message([](CacheMemoryOptions& o) { o.length = o.batch = std::int64_t{1} << 40; }),
            "compare_cache_memory: length: got sizes whose product is too large, expected one "
            "below 2^63");
  EXPECT_EQ(compare_cache_memory({.num_heads = 8, .head_dim = 8}).front().reduction, 0);
}

}  // namespace
}  // namespace ladon::test
