// Sequences that share a prefix: one read of it serves all, without a trace in the results.

#include <gtest/gtest.h>

#include <memory>
#include <numeric>
#include <vector>

#include "cache/cache_support.h"
#include "cpu/drivers/forward_plan.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

class CachePrefix : public ContextTest {};
class CachePrefixGroups : public ContextTest {};

/// The groups that the driver would make, as pairs (sequences, splits).
std::vector<std::pair<std::int64_t, std::int64_t>> groups_of(const KvCache& cache,
                                                             std::int64_t query_len = 1) {
  const KvCacheView view = cache.view();
  std::vector<Sequence> sequences;
  for (const KvSequenceView& from : view.sequences) {
    Sequence& sequence = sequences.emplace_back();
    sequence.query_len = query_len;
    sequence.kv_len = from.length;
    sequence.position_offset = from.length - query_len;
    sequence.pages = from.pages;
  }
  AttentionParams params;
  params.num_sequences = static_cast<std::int64_t>(sequences.size());
  params.sequences = sequences.data();
  params.kv_layout.page_size = view.page_size;
  params.rules.window_left = kNoWindow;
  params.rules.window_right = 0;
  cpu::KernelSet kernels;
  kernels.tile_rows = 64;
  kernels.decode_rows = 16;
  std::vector<std::pair<std::int64_t, std::int64_t>> groups;
  std::vector<cpu::SequencePlan> plans;
  for (const Sequence& sequence : sequences) {
    plans.push_back(cpu::plan_sequence(params, sequence, kernels, false));
  }
  for (std::int64_t s = 0; s < params.num_sequences;) {
    const cpu::PrefixGroup group = cpu::prefix_group(params, plans.data(), s);
    groups.emplace_back(group.sequences, group.splits);
    s += group.sequences;
  }
  return groups;
}

TEST_P(CachePrefixGroups, NeighboursWithTheSamePagesFormAGroup) {
  const KvCacheOptions options{.num_kv_heads = 1, .head_dim = 4};
  const auto pool = std::make_shared<PagePool>(context_, options, 16, 4096);
  const auto append = [&](KvCache& cache, std::int64_t count) {
    const Tensor k(context_, DType::kF32, {cache.batch(), count, 1, 4});
    cache.append(context_, k, k);
  };
  KvCache cache = KvCache::paged(pool, 2);
  append(cache, 4 * cpu::kSplitKeys + 5);
  // Two prompts, three continuations of the first and one of the second.
  cache.reorder(context_, std::vector<std::int64_t>{0, 0, 0, 1});
  append(cache, 10);
  using Groups = std::vector<std::pair<std::int64_t, std::int64_t>>;
  EXPECT_EQ(groups_of(cache), (Groups{{3, 4}, {1, 0}}));
  // Many rows are tiles, which share nothing this way.
  EXPECT_EQ(groups_of(cache, 100), (Groups{{1, 0}, {1, 0}, {1, 0}, {1, 0}}));
  // A group has an end.
  cache.reorder(context_, std::vector<std::int64_t>(40, 0));
  EXPECT_EQ(groups_of(cache), (Groups{{16, 4}, {16, 4}, {8, 4}}));
  // A short prefix is left to itself.
  cache.reset();
  append(cache, 40);
  cache.reorder(context_, std::vector<std::int64_t>{0, 0});
  EXPECT_EQ(groups_of(cache), (Groups{{1, 0}, {1, 0}}));
}

TEST_P(CachePrefix, SharedPagesGiveTheBitsOfOwnPages) {
  const std::int64_t prefix = 2 * cpu::kSplitKeys + 37;
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    for (const DType storage : kStorages) {
      const KvCacheOptions options{.num_kv_heads = kv_heads, .head_dim = 12, .format = storage};
      const auto pool = std::make_shared<PagePool>(context_, options, 16, 2000);
      KvCache shared = KvCache::paged(pool, 1);
      const Tensor k = random_tensor(context_, DType::kF32, {1, prefix, kv_heads, 12}, 1);
      const Tensor v = random_tensor(context_, DType::kF32, {1, prefix, kv_heads, 12}, 2);
      shared.append(context_, k, v);
      shared.reorder(context_, std::vector<std::int64_t>(5, 0));
      KvCache own = KvCache::paged(pool, 5);
      Tensor wide_k(context_, DType::kF32, {5, prefix, kv_heads, 12});
      Tensor wide_v(context_, DType::kF32, {5, prefix, kv_heads, 12});
      for (std::int64_t b = 0; b < 5; ++b) {
        copy(context_, k.view().select(0, 0), wide_k.view().select(0, b));
        copy(context_, v.view().select(0, 0), wide_v.view().select(0, b));
      }
      own.append(context_, wide_k, wide_v);
      // Suffixes of their own, of different lengths.
      const std::vector<std::int64_t> lengths = {3, 600, 1, 0, 20};
      const Tensor suffix = random_tensor(context_, DType::kF32, {5, 600, kv_heads, 12}, 3);
      for (KvCache* cache : {&shared, &own}) cache->append(context_, suffix, suffix, lengths);
      EXPECT_LT(pool->statistics().used_pages, 5 * 70 + 80 + 70);
      const Tensor q = random_tensor(context_, DType::kF32, {5, 1, 4, 12}, 4);
      const Tensor sinks = random_tensor(context_, DType::kF32, {4}, 5);
      Tensor outs[] = {Tensor(context_, DType::kF32, {5, 1, 4, 12}),
                       Tensor(context_, DType::kF32, {5, 1, 4, 12})};
      Tensor lses[] = {Tensor(context_, DType::kF32, {5, 4, 1}),
                       Tensor(context_, DType::kF32, {5, 4, 1})};
      const AttentionOptions call{.causal = true, .sinks = sinks};
      attention(context_, q, shared.view(), call, outs[0], lses[0]);
      attention(context_, q, own.view(), call, outs[1], lses[1]);
      EXPECT_TRUE(same_bits(outs[0].view(), outs[1].view())) << name_of(storage);
      EXPECT_TRUE(same_bits(lses[0].view(), lses[1].view())) << name_of(storage);
    }
  }
}

TEST_P(CachePrefix, UnrelatedRequestsFindEachOthersPages) {
  const MultiHeadAttention layer = there(MultiHeadAttention(
      {.embed_dim = 24, .num_heads = 4, .num_kv_heads = 2, .causal = true, .rope = RopeOptions{}},
      3));
  const auto pool = std::make_shared<PagePool>(context_, layer.cache_options(), 8, 32);
  const Tensor x = random_tensor(context_, DType::kF32, {50, 24}, 1);
  std::vector<std::int64_t> tokens(50);
  std::iota(tokens.begin(), tokens.end(), 1000);
  const Tensor truth = layer.forward(context_, x);
  {
    KvCache first = KvCache::paged(pool);
    layer.forward(context_, x.view().slice(0, 0, 45), first);
    first.publish_prefix(0, std::span(tokens).first(45));
  }
  EXPECT_EQ(pool->statistics().kept_pages, 5);
  KvCache second = KvCache::paged(pool);
  const std::int64_t found = second.adopt_prefix(0, std::span(tokens).first(49));
  EXPECT_EQ(found, 40);
  EXPECT_EQ(second.length(), 40);
  const Tensor out = layer.forward(context_, x.view().slice(0, found, 50), second);
  EXPECT_LE(relative_difference(out, Tensor::copy_of(context_, truth.view().slice(0, found, 50))),
            1e-5);
  const PagePool::Statistics statistics = pool->statistics();
  EXPECT_EQ(statistics.prefix_lookups, 1);
  EXPECT_EQ(statistics.prefix_tokens_found, 40);
  // Other tokens find nothing.
  tokens[3] = 7;
  KvCache third = KvCache::paged(pool);
  EXPECT_EQ(third.adopt_prefix(0, tokens), 0);
}

LADON_FOR_EACH_CONTEXT(CachePrefix);
LADON_FOR_EACH_CONTEXT(CachePrefixGroups);

}  // namespace
}  // namespace ladon::test
