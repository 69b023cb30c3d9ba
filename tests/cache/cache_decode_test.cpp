// Decoding, token by token: what it allocates, what an append touches, and several threads at once.

#include <gtest/gtest.h>

#include <thread>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"
#include "support/counted_new.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kEmbed = 32;
constexpr std::int64_t kWindow = 15;

std::vector<CacheKind> all_kinds() {
  std::vector<CacheKind> kinds = unlimited_kinds();
  kinds.push_back({"window", 0, kWindow});
  return kinds;
}

class CacheDecode : public ContextTest {
 protected:
  MultiHeadAttention make_layer(DType dtype = DType::kF32) const {
    return there(MultiHeadAttention({.embed_dim = kEmbed,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 16,
                                     .query_bias = true,
                                     .out_bias = true,
                                     .causal = true,
                                     .rope = RopeOptions{},
                                     .qk_norm = true,
                                     .window_left = kWindow,
                                     .sinks = true,
                                     .dtype = dtype},
                                    5));
  }
};

TEST_P(CacheDecode, OneTokenAllocatesNothing) {
  if (GetParam().is_reference()) GTEST_SKIP() << "the reference is not for decoding";
  if (GetParam().is_cuda()) GTEST_SKIP() << "only the CPU promises it";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MultiHeadAttention layer = make_layer(dtype);
    for (const CacheKind& kind : all_kinds()) {
      for (const DType storage : kStorages) {
        KvCache cache = make_cache(context_, kind, layer.cache_options(3, storage));
        cache.reserve(context_, 700);
        const Tensor x = random_tensor(context_, dtype, {3, 1, kEmbed}, 1);
        const Tensor prompt = random_tensor(context_, dtype, {3, 500, kEmbed}, 2);
        Tensor out(context_, dtype, {3, 1, kEmbed});
        layer.forward(context_, prompt, cache);
        // To warm up, past the place where keys are split: parts need scratch memory of their own.
        for (int i = 0; i < 20; ++i) layer.forward(context_, x, cache, {}, out);
        const std::int64_t before = allocations;
        // Over the borders of pages.
        for (int i = 0; i < 80; ++i) layer.forward(context_, x, cache, {}, out);
        EXPECT_EQ(allocations - before, 0)
            << kind.name << " page " << kind.page_size << " " << name_of(storage);
        const std::vector<std::int64_t> ragged = {1, 0, 1};
        layer.forward(context_, x, cache, {.new_lengths = ragged}, out);
        const std::int64_t before_ragged = allocations;
        for (int i = 0; i < 10; ++i) {
          layer.forward(context_, x, cache, {.new_lengths = ragged}, out);
        }
        EXPECT_EQ(allocations - before_ragged, 0) << "ragged, " << kind.name;
      }
    }
  }
}

TEST_P(CacheDecode, AppendingTouchesOnlyItsOwnSlots) {
  // No time is measured: that the past is not copied shows in the memory, which stays where it is,
  // and in slots before the new ones, which keep even what a copy would not (poison behind a
  // truncated end).
  const KvCacheOptions options{.num_kv_heads = 2, .head_dim = 8};
  const std::int64_t past = 4000;
  const Tensor k = random_tensor(context_, DType::kF32, {1, past, 2, 8}, 3);
  const Tensor one = random_tensor(context_, DType::kF32, {1, 1, 2, 8}, 4);
  for (const CacheKind& kind : unlimited_kinds()) {
    KvCache cache = make_cache(context_, kind, options, 2 * past);
    cache.reserve(context_, past + 1000);
    cache.append(context_, k, k);
    const void* const memory = cache.view().k;
    std::vector<std::int64_t> slots;
    for (std::int64_t j = 0; j < past; ++j) {
      slots.push_back(slot_in(cache.view(), cache.view().sequences[0], j));
    }
    const std::int64_t before = allocations;
    for (int i = 0; i < 500; ++i) cache.append(context_, one, one);
    if (!GetParam().is_cuda()) {
      EXPECT_EQ(allocations - before, 0) << kind.name;
    }
    EXPECT_EQ(cache.view().k, memory) << kind.name;
    for (std::int64_t j = 0; j < past; ++j) {
      ASSERT_EQ(slot_in(cache.view(), cache.view().sequences[0], j),
                slots[static_cast<std::size_t>(j)]);
    }
  }
}

TEST_P(CacheDecode, GrowingCopiesAConstantNumberOfTimes) {
  // Doubling: over n appends the memory moves log2(n) times at most.
  KvCache cache = KvCache::contiguous(context_, {.num_kv_heads = 1, .head_dim = 4});
  const Tensor one = random_tensor(context_, DType::kF32, {1, 1, 1, 4}, 4);
  std::int64_t moves = 0;
  const void* memory = nullptr;
  for (int i = 0; i < 5000; ++i) {
    cache.append(context_, one, one);
    if (cache.view().k != memory) ++moves;
    memory = cache.view().k;
  }
  EXPECT_LE(moves, 8);  // 64, 128, ... 8192
}

TEST_P(CacheDecode, TwoThreadsOnTwoForksAgreeWithOne) {
  const MultiHeadAttention layer = make_layer();
  std::vector<CacheKind> kinds = all_kinds();
  for (const CacheKind& kind : kinds) {
    for (const DType storage : {DType::kF32, DType::kI8, DType::kF8E4M3}) {
      const Tensor prompt = random_tensor(context_, DType::kF32, {30, kEmbed}, 2);
      const Tensor futures[] = {random_tensor(context_, DType::kF32, {40, kEmbed}, 10),
                                random_tensor(context_, DType::kF32, {40, kEmbed}, 11)};
      KvCache prefix = make_cache(context_, kind, layer.cache_options(1, storage));
      layer.forward(context_, prompt, prefix);
      const auto decode = [&](KvCache& cache, const Tensor& future) {
        Tensor out(context_, DType::kF32, {40, kEmbed});
        for (std::int64_t t = 0; t < 40; ++t) {
          layer.forward(context_, future.view().slice(0, t, t + 1), cache, {},
                        out.view().slice(0, t, t + 1));
        }
        return out;
      };
      std::vector<Tensor> alone;
      for (const Tensor& future : futures) {
        KvCache fork = prefix.fork(context_);
        alone.push_back(decode(fork, future));
      }
      std::vector<Tensor> together(2);
      {
        std::vector<std::thread> threads;
        for (std::size_t i = 0; i < 2; ++i) {
          threads.emplace_back([&, i] {
            KvCache fork = prefix.fork(context_);
            together[i] = decode(fork, futures[i]);
          });
        }
        for (std::thread& thread : threads) thread.join();
      }
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_TRUE(same_bits(together[i].view(), alone[i].view())) << kind.name;
      }
      EXPECT_EQ(prefix.length(), 30);
    }
  }
}

LADON_FOR_EACH_CONTEXT(CacheDecode);

}  // namespace
}  // namespace ladon::test
