// Decoding with LatentAttention: nothing grows with the cache, and no key is ever expanded.

#include <gtest/gtest.h>

#include <cstdio>
#include <thread>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/latent_attention.h"
#include "support/contexts.h"
#include "support/counted_new.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// DeepSeek-V3's attention, but for the width of the model, which decoding over a cache does not
/// see.
LatentAttention v3_layer() {
  return LatentAttention({.embed_dim = 64,
                          .num_heads = 128,
                          .query_rank = 96,
                          .kv_rank = 512,
                          .nope_dim = 128,
                          .rope_dim = 64,
                          .value_dim = 128,
                          .causal = true},
                         1);
}

// On the CPU: it counts the host's allocations.
TEST(LatentDecode, ExpandedTokensAllocateNothing) {
  for (const std::int64_t batch : {1, 3}) {
    LatentAttention layer({.embed_dim = 64,
                           .num_heads = 4,
                           .query_rank = 16,
                           .kv_rank = 32,
                           .nope_dim = 16,
                           .rope_dim = 8,
                           .causal = true},
                          1);
    layer.set_form(LatentForm::kExpanded);
    const Context context(ContextOptions{.num_threads = 2});
    KvCache cache = KvCache::contiguous(context, layer.cache_options(batch), 400);
    layer.forward(context, random_tensor(DType::kF32, {batch, 300, 64}, 2), cache);
    const Tensor x = random_tensor(DType::kF32, {batch, 1, 64}, 1);
    Tensor out(DType::kF32, x.shape());
    layer.forward(context, x, cache, {}, out);
    const std::int64_t count = allocations;
    for (int i = 0; i < 5; ++i) layer.forward(context, x, cache, {}, out);
    EXPECT_EQ(allocations - count, 0);
  }
}

// On the CPU: it counts the host's allocations.
TEST(LatentDecode, MemoryDoesNotGrowWithTheCache) {
  const LatentAttention layer = v3_layer();
  const Tensor x = random_tensor(DType::kF32, {1, 1, 64}, 1);
  Tensor out(DType::kF32, {1, 1, 64});
  std::vector<std::int64_t> bytes;
  for (const std::int64_t tokens : {1024, 8192}) {
    KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(1), tokens + 8);
    cache.append(host_context(), random_tensor(DType::kF32, {1, tokens, 1, 576}, 2, 0.1), {});
    EXPECT_EQ(layer.form_for(1, tokens + 1), LatentForm::kAbsorbed);
    // A new Context has no memory yet: what it allocates is all that the call needs.
    const Context context(ContextOptions{.num_threads = 2});
    const std::int64_t before = allocated_bytes;
    layer.forward(context, x, cache, {}, out);
    bytes.push_back(allocated_bytes - before);
    const std::int64_t count = allocations;
    for (int i = 0; i < 3; ++i) layer.forward(context, x, cache, {}, out);
    EXPECT_EQ(allocations - count, 0);
    const double mib = 1 << 20;
    std::printf(
        "%lld cached tokens: the first call allocates %.2f MiB, later ones nothing; it "
        "goes over %.2f MiB of latents, once for each tile of query rows, where expanded keys "
        "and values would be %.0f MiB\n",
        static_cast<long long>(tokens), static_cast<double>(bytes.back()) / mib,
        static_cast<double>(cache.bytes_used()) / mib,
        static_cast<double>(cache.length() * 128 * (192 + 128) * 4) / mib);
  }
  EXPECT_EQ(bytes[1], bytes[0]);
  EXPECT_LT(bytes[1], 32 << 20);
}

class LatentBits : public ContextTest {};

LatentAttention small_layer() {
  return LatentAttention({.embed_dim = 20,
                          .num_heads = 3,
                          .query_rank = 7,
                          .kv_rank = 9,
                          .nope_dim = 6,
                          .rope_dim = 4,
                          .value_dim = 5,
                          .causal = true},
                         3);
}

TEST_P(LatentBits, ARowDoesNotDependOnItsNeighboursOrOnThreads) {
  const LatentAttention layer = there(small_layer());
  const Context seven = GetParam().context(7);
  for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
    LatentAttention one = layer;
    one.set_form(form);
    const Tensor x = random_tensor(context_, DType::kF32, {64, 9, 20}, 1);
    const Tensor all = one.forward(context_, x);
    context_.synchronize();
    const Tensor threads = one.forward(seven, x);
    seven.synchronize();
    EXPECT_TRUE(same_bits(all.view(), threads.view()));
    const Tensor alone = one.forward(context_, x.view().slice(0, 17, 18));
    EXPECT_TRUE(same_bits(alone.view(), all.view().slice(0, 17, 18)));
    // Later positions do not touch earlier ones.
    const Tensor shorter = one.forward(context_, x.view().slice(0, 17, 18).slice(1, 0, 4));
    EXPECT_LE(relative_difference(shorter, Tensor::copy_of(context_, alone.view().slice(1, 0, 4))),
              1e-6);
    // The same through a cache, token by token, among others and alone.
    KvCache many = KvCache::contiguous(context_, one.cache_options(64));
    KvCache single = KvCache::contiguous(context_, one.cache_options(1));
    context_.synchronize();
    for (std::int64_t t = 0; t < 9; ++t) {
      const Tensor among = one.forward(seven, x.view().slice(1, t, t + 1), many);
      seven.synchronize();
      const Tensor own =
          one.forward(context_, x.view().slice(0, 17, 18).slice(1, t, t + 1), single);
      EXPECT_TRUE(same_bits(own.view(), among.view().slice(0, 17, 18)));
    }
  }
}

TEST_P(LatentBits, ThreadsMayShareALayer) {
  const LatentAttention layer = there(small_layer());
  const Tensor x = random_tensor(context_, DType::kF32, {1, 30, 20}, 1);
  const Tensor alone = layer.forward(context_, x);
  std::vector<Tensor> outs(3);
  std::vector<std::thread> threads;
  for (Tensor& out : outs) {
    threads.emplace_back([&] { out = layer.forward(context_, x); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Tensor& out : outs) EXPECT_TRUE(same_bits(out.view(), alone.view()));
}

LADON_FOR_EACH_CONTEXT(LatentBits);

}  // namespace
}  // namespace ladon::test
