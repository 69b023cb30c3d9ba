// Bad input to caches and to attention over them: each is refused with a message that says which
// argument, what came and what was expected, and nothing has changed.

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/multi_head_attention.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

const KvCacheOptions kOptions{.batch = 2, .num_kv_heads = 2, .head_dim = 4};

TEST(CacheErrors, Options) {
  const auto message = [](KvCacheOptions options) {
    return error_of([&] { KvCache::contiguous(host_context(), options); });
  };
  EXPECT_EQ(message({.num_kv_heads = 0, .head_dim = 4}),
            "KvCache::contiguous: num_kv_heads: got 0, expected 1 to 16777216");
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = -1}),
            "KvCache::contiguous: head_dim: got -1, expected 1 to 16777216");
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = 4, .value_dim = -3}),
            "KvCache::contiguous: value_dim: got -3, expected 1 to 16777216");
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = 4, .num_heads = 3}),
            "KvCache::contiguous: num_heads: got 3, expected a multiple of num_kv_heads = 2");
  const std::int64_t least = std::numeric_limits<std::int64_t>::min();
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = least}),
            "KvCache::contiguous: head_dim: got -9223372036854775808, expected 1 to 16777216");
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = 4, .mha_dim = -1}),
            "KvCache::contiguous: mha_dim: got -1, expected 1 to 33554432");
  EXPECT_EQ(message({.batch = -1, .num_kv_heads = 2, .head_dim = 4}),
            "KvCache::contiguous: batch: got -1, expected 0 to 2147483648");
  EXPECT_EQ(message({.num_kv_heads = 2, .head_dim = 4, .format = DType::kI32}),
            "KvCache::contiguous: format: got i32, expected f64, f32, f16, bf16, i8 or f8e4m3");
  EXPECT_EQ(error_of([] { KvCache::contiguous(host_context(), kOptions, -1); }),
            "KvCache::contiguous: capacity: got -1, expected 0 (grow) or more");
  EXPECT_EQ(error_of([] { KvCache::window(host_context(), kOptions, -1); }),
            "KvCache::window: window_left: got -1, expected 0 to 1099511627776");
  EXPECT_EQ(error_of([] { KvCache::window(host_context(), kOptions, 3, -1); }),
            "KvCache::window: spare: got -1, expected 0 to 1099511627776");
  EXPECT_EQ(error_of([] { KvCache::paged(nullptr); }),
            "KvCache::paged: pool: got none, expected a PagePool");
  EXPECT_EQ(error_of([] { PagePool(host_context(), kOptions, 0, 4); }),
            "PagePool: page_size: got 0, expected 1 to 2147483647");
  EXPECT_EQ(error_of([] { PagePool(host_context(), kOptions, 4, -1); }),
            "PagePool: num_pages: got -1, expected 0 to 2147483647");
  error_of([] { KvCache::contiguous(host_context(), kOptions, std::int64_t{1} << 62); },
           ErrorCode::kOutOfMemory);
  error_of([] { PagePool(host_context(), kOptions, 1 << 30, 1 << 30); }, ErrorCode::kOutOfMemory);
}

/// Every kind, with a few tokens in it, and no space for many more.
std::vector<KvCache> filled_caches() {
  std::vector<KvCache> caches;
  caches.push_back(KvCache::contiguous(host_context(), kOptions, 8));
  caches.push_back(KvCache::window(host_context(), kOptions, 3, 2));
  caches.push_back(KvCache::paged(std::make_shared<PagePool>(host_context(), kOptions, 2, 6), 2));
  for (KvCache& cache : caches) {
    const Tensor k = random_tensor(DType::kF32, {2, 5, 2, 4}, 1);
    cache.append(host_context(), k, k, std::vector<std::int64_t>{5, 3});
  }
  return caches;
}

/// The message of a call on each kind of cache; it must leave all of them as they were.
template <class Call>
std::vector<std::string> messages_of(Call&& call, ErrorCode code = ErrorCode::kInvalidArgument) {
  std::vector<std::string> messages;
  for (KvCache& cache : filled_caches()) {
    const CacheState before = state_of(cache);
    messages.push_back(error_of([&] { call(cache); }, code));
    EXPECT_EQ(state_of(cache), before) << cache.kind();
  }
  return messages;
}

template <class Call>
void expect_message(Call&& call, const std::string& expected,
                    ErrorCode code = ErrorCode::kInvalidArgument) {
  for (const std::string& message : messages_of(call, code)) EXPECT_EQ(message, expected);
}

TEST(CacheErrors, Append) {
  const auto append = [](const Tensor& k, const Tensor& v,
                         const std::vector<std::int64_t>& lengths = {}) {
    return [&k, &v, lengths](KvCache& cache) { cache.append(host_context(), k, v, lengths); };
  };
  const Tensor good(DType::kF32, {2, 1, 2, 4});
  const Tensor heads(DType::kF32, {2, 1, 3, 4});
  const Tensor rank(DType::kF32, {2, 1, 8});
  const Tensor batch(DType::kF32, {3, 1, 2, 4});
  const Tensor longer(DType::kF32, {2, 2, 2, 4});
  const Tensor integers(DType::kI32, {2, 1, 2, 4});
  expect_message(append(heads, good),
                 "KvCache::append: k: got [2, 1, 3, 4], expected [batch, new_len, 2, 4] as the "
                 "cache holds");
  expect_message(append(good, heads),
                 "KvCache::append: v: got [2, 1, 3, 4], expected [batch, new_len, 2, 4] as the "
                 "cache holds");
  expect_message(append(good, longer),
                 "KvCache::append: v: got [2, 2, 2, 4], expected as many sequences and tokens as "
                 "in k's [2, 1, 2, 4]");
  expect_message(append(batch, batch),
                 "KvCache::append: k: got [3, 1, 2, 4], expected a batch of 2 as the cache has");
  expect_message(
      append(good, good, {1}),
      "KvCache::append: new_lengths: got 1 lengths, expected 2: one for each sequence of "
      "the cache");
  expect_message(append(good, good, {1, 2}),
                 "KvCache::append: new_lengths: got 2 at index 1, expected 0 to 1, k's tokens");
  for (const std::string& message : messages_of(append(rank, rank))) {
    EXPECT_NE(message.find("KvCache::append: k: "), std::string::npos) << message;
  }
  for (const std::string& message : messages_of(append(integers, integers))) {
    EXPECT_NE(message.find("i32"), std::string::npos) << message;
  }
  const Tensor packed(DType::kF32, {1, 4, 2, 4});
  expect_message(append(packed, packed, {1, 2}),
                 "KvCache::append: k: got [1, 4, 2, 4], expected a batch of 2, or 1 with as many "
                 "tokens as new_lengths sum up to");
}

TEST(CacheErrors, NoRoom) {
  std::vector<KvCache> caches = filled_caches();
  const Tensor k = random_tensor(DType::kF32, {2, 4, 2, 4}, 1);
  const CacheState contiguous = state_of(caches[0]);
  EXPECT_EQ(
      error_of([&] { caches[0].append(host_context(), k, k); }),
      "KvCache::append: length: got a sequence of 9 tokens, expected at most the cache's capacity "
      "of 8");
  EXPECT_EQ(state_of(caches[0]), contiguous);
  EXPECT_EQ(error_of([&] { caches[0].reserve(host_context(), 9); }),
            "KvCache::reserve: length: got a sequence of 9 tokens, expected at most the cache's "
            "capacity of 8");
  // The pool has a page left: the first sequence would fit, the second would not.
  const CacheState paged = state_of(caches[2]);
  EXPECT_EQ(error_of([&] { caches[2].append(host_context(), k, k); }, ErrorCode::kOutOfMemory),
            "KvCache::append: pool: got 1 free pages of 6, expected 4");
  EXPECT_EQ(state_of(caches[2]), paged);
  caches[2].append(host_context(), k, k, std::vector<std::int64_t>{1, 3});  // what fits goes in
  EXPECT_EQ(caches[2].length(1), 6);
}

TEST(CacheErrors, Operations) {
  expect_message([](KvCache& cache) { cache.truncate(0, 6); },
                 "KvCache::truncate: length: got 6, expected 0 to 5");
  expect_message([](KvCache& cache) { cache.truncate(0, -1); },
                 "KvCache::truncate: length: got -1, expected 0 to 5");
  expect_message([](KvCache& cache) { cache.truncate(2, 0); },
                 "KvCache::truncate: sequence: got 2, expected 0 to 1: the cache has 2 sequences");
  expect_message([](KvCache& cache) { cache.reset(-1); },
                 "KvCache::reset: sequence: got -1, expected 0 to 1: the cache has 2 sequences");
  expect_message([](KvCache& cache) { static_cast<void>(cache.length(7)); },
                 "KvCache::length: sequence: got 7, expected 0 to 1: the cache has 2 sequences");
  expect_message(
      [](KvCache& cache) {
        cache.reorder(host_context(), std::vector<std::int64_t>{0, 2});
      },
      "KvCache::reorder: from: got 2 at index 1, expected 0 to 1");
  expect_message([](KvCache& cache) { cache.reserve(host_context(), -1); },
                 "KvCache::reserve: length: got -1, expected 0 to 1099511627776");
  expect_message(
      [](KvCache& cache) {
        const Tensor k(DType::kF32, {2, 1, 2, 4});
        const KvAppend pending(host_context(), cache, k, k);
        cache.truncate(0, 0);
      },
      "KvCache::truncate: cache: got one with a KvAppend that has not ended, expected commit() or "
      "its end first");
  KvCache contiguous = KvCache::contiguous(host_context(), kOptions);
  EXPECT_EQ(error_of([&] { contiguous.adopt_prefix(0, {}); }, ErrorCode::kUnsupported),
            "KvCache::adopt_prefix: cache: got a contiguous cache, expected a paged one");
  EXPECT_EQ(error_of([&] { contiguous.publish_prefix(0, {}); }, ErrorCode::kUnsupported),
            "KvCache::publish_prefix: cache: got a contiguous cache, expected a paged one");
  std::vector<KvCache> caches = filled_caches();
  const std::vector<std::int64_t> tokens(9, 1);
  EXPECT_EQ(error_of([&] { caches[2].publish_prefix(0, tokens); }),
            "KvCache::publish_prefix: token_ids: got 9 of them, expected at most the 5 tokens that "
            "the sequence holds");
  EXPECT_EQ(error_of([&] { caches[2].adopt_prefix(0, tokens); }),
            "KvCache::adopt_prefix: sequence: got one of 5 tokens, expected an empty one");
}

TEST(CacheErrors, AWindowCannotGoBackPastWhatItDropped) {
  KvCache cache = KvCache::window(host_context(), {.num_kv_heads = 1, .head_dim = 2}, 3, 2);
  const Tensor k = random_tensor(DType::kF32, {1, 20, 1, 2}, 1);
  cache.append(host_context(), k, k);
  EXPECT_EQ(cache.held(), 5);
  EXPECT_EQ(error_of([&] { cache.truncate(0, 17); }),
            "KvCache::truncate: length: got 17, expected 18 to 20: the window has dropped what an "
            "earlier token would see");
  cache.truncate(0, 18);
  EXPECT_EQ(cache.held(), 3);
  EXPECT_EQ(error_of([&] { cache.truncate(0, 17); }),
            "KvCache::truncate: length: got 17, expected 18 to 18: the window has dropped what an "
            "earlier token would see");
  cache.reset(0);
  EXPECT_EQ(cache.length(), 0);
}

TEST(CacheErrors, LayerAndCacheMustFit) {
  const Context context;
  const MultiHeadAttention layer(
      {.embed_dim = 8, .num_heads = 4, .num_kv_heads = 2, .head_dim = 4, .causal = true});
  const Tensor x = random_tensor(DType::kF32, {2, 3, 8}, 1);
  const auto refused = [&](KvCache cache, const MultiHeadAttention& with, const Tensor& input,
                           const CachedCall& call = {}) {
    const CacheState before = state_of(cache);
    const std::string message = error_of([&] { with.forward(context, input, cache, call); });
    EXPECT_EQ(state_of(cache), before);
    return message;
  };
  EXPECT_EQ(
      refused(KvCache::contiguous(host_context(), {.batch = 2, .num_kv_heads = 4, .head_dim = 4}),
              layer, x),
      "MultiHeadAttention::forward: cache: got one of 4 KV heads of 4 and 4, expected the "
      "layer's 2 KV heads of 4 and 4");
  EXPECT_EQ(
      refused(KvCache::contiguous(host_context(), layer.cache_options(2, DType::kF64)), layer, x),
      "MultiHeadAttention::forward: cache: got dtype f64, expected a narrower one for a layer "
      "of f32");
  EXPECT_EQ(
      refused(KvCache::contiguous(host_context(), layer.cache_options(3)), layer, x),
      "MultiHeadAttention::forward: x: got [2, 3, 8], expected a batch of 3 as the cache has");
  EXPECT_EQ(refused(KvCache::window(host_context(), layer.cache_options(2), 5), layer, x),
            "MultiHeadAttention::forward: cache: got a window of 5, expected one that keeps every "
            "token, because the layer has no window_left");
  MultiHeadAttentionOptions options = layer.options();
  options.window_left = 9;
  options.dropout = 0.5;
  MultiHeadAttention windowed(options);
  EXPECT_EQ(
      refused(KvCache::window(host_context(), layer.cache_options(2), 5), windowed, x),
      "MultiHeadAttention::forward: cache: got a window of 5, expected at least the layer's 9");
  EXPECT_EQ(refused(KvCache::window(host_context(), layer.cache_options(2), 9), windowed, x),
            "MultiHeadAttention::forward: cache: got one while the layer trains with dropout, "
            "expected eval() first");
  const std::vector<std::int64_t> lengths = {3, 4};
  EXPECT_EQ(
      refused(KvCache::contiguous(host_context(), layer.cache_options(2)), layer, x,
              {.new_lengths = lengths}),
      "MultiHeadAttention::forward: new_lengths: got 4 at index 1, expected 0 to x's 3 tokens");
  const Tensor packed = random_tensor(DType::kF32, {6, 8}, 1);
  EXPECT_EQ(refused(KvCache::contiguous(host_context(), layer.cache_options(2)), layer, packed,
                    {.new_lengths = lengths}),
            "MultiHeadAttention::forward: new_lengths: got a sum other than x's 6 tokens, expected "
            "the packed tokens of all sequences");
  const Tensor wide = random_tensor(DType::kF32, {2, 3, 9}, 1);
  EXPECT_EQ(refused(KvCache::contiguous(host_context(), layer.cache_options(2)), layer, wide),
            "MultiHeadAttention::forward: x: got [2, 3, 9], expected a width of 8");
  // A pool that runs out in the middle of the batch.
  KvCache paged =
      KvCache::paged(std::make_shared<PagePool>(host_context(), layer.cache_options(), 2, 3), 2);
  const CacheState before = state_of(paged);
  EXPECT_EQ(error_of([&] { layer.forward(context, x, paged); }, ErrorCode::kOutOfMemory),
            "KvCache::append: pool: got 3 free pages of 3, expected 4");
  EXPECT_EQ(state_of(paged), before);
  // A mask that does not fit is found after the tokens were written.
  KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(2));
  const CacheState empty = state_of(cache);
  const Tensor mask(DType::kBool, {1, 1, 3, 9});
  error_of([&] { layer.forward(context, x, cache, {.mask = mask}); });
  EXPECT_EQ(state_of(cache), empty);
}

TEST(CacheErrors, EmptyCachesOfEveryStorageCanBeAttendedTo) {
  const Context context;
  for (const DType storage : kStorages) {
    const KvCacheOptions options{.num_kv_heads = 2, .head_dim = 4, .format = storage};
    for (KvCache* cache :
         {new KvCache(KvCache::contiguous(host_context(), options)),
          new KvCache(KvCache::paged(std::make_shared<PagePool>(host_context(), options, 4, 0)))}) {
      const std::unique_ptr<KvCache> owner(cache);
      const Tensor q = random_tensor(DType::kF32, {1, 1, 4, 4}, 1);
      Tensor out = random_tensor(DType::kF32, {1, 1, 4, 4}, 2);
      attention(context, q, cache->view(), {}, out);
      for (std::int64_t i = 0; i < 16; ++i) EXPECT_EQ(number_at(out, i), 0);
    }
  }
}

TEST(CacheErrors, ABadMaskCostsAPoolNothing) {
  const Context context;
  const MultiHeadAttention layer(
      {.embed_dim = 8, .num_heads = 4, .num_kv_heads = 2, .head_dim = 4, .causal = true});
  const auto pool = std::make_shared<PagePool>(host_context(), layer.cache_options(), 2, 3);
  {
    KvCache gone = KvCache::paged(pool);
    const Tensor k(DType::kF32, {1, 4, 2, 4});
    gone.append(host_context(), k, k);
    gone.publish_prefix(0, std::vector<std::int64_t>{1, 2, 3, 4});
  }
  EXPECT_EQ(pool->statistics().kept_pages, 2);
  KvCache cache = KvCache::paged(pool);
  const Tensor x = random_tensor(DType::kF32, {1, 5, 8}, 1);
  const Tensor mask(DType::kBool, {1, 1, 5, 9});
  EXPECT_EQ(
      error_of([&] { layer.forward(context, x, cache, {.mask = mask}); }),
      "MultiHeadAttention::forward: mask: got [1, 1, 5, 9], expected [1, 4, 5, 5] or 1 in any "
      "place");
  EXPECT_EQ(pool->statistics().kept_pages, 2);
  EXPECT_EQ(pool->statistics().evictions, 0);
}

}  // namespace
}  // namespace ladon::test
