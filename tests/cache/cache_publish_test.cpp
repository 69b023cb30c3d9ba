// What a pool keeps of published prefixes, and what it gives up first; and that forks share.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_model.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

using Ids = std::vector<std::int64_t>;

const KvCacheOptions kOptions{.num_kv_heads = 2, .head_dim = 3};

Tokens tokens_of(const Ids& ids) {
  Tokens tokens;
  for (const std::int64_t id : ids) push_token(tokens, id);
  return tokens;
}

class Forks : public ContextTest {
 protected:
  /// Goes on with a sequence of a cache of one, up to `tokens`.
  void extend(KvCache& cache, const Tokens& tokens) const {
    const std::int64_t first = cache.length();
    const std::int64_t count = static_cast<std::int64_t>(tokens.size()) - first;
    Tensor k(DType::kF32, {1, count, 2, 3});
    Tensor v(DType::kF32, {1, count, 2, 3});
    for (std::int64_t i = 0; i < k.num_elements(); ++i) {
      const Token& token = tokens[static_cast<std::size_t>(first + i / 6)];
      store_element(k.data(), DType::kF32, i, number_of(token, false, i / 3 % 2, i % 3));
      store_element(v.data(), DType::kF32, i, number_of(token, true, i / 3 % 2, i % 3));
    }
    cache.append(context_, there(k), there(v));
  }
  std::string difference_of(const KvCache& cache, const Tokens& tokens) const {
    return difference(host_view(context_, cache.view()).view, 0, tokens, 0);
  }
};
LADON_FOR_EACH_CONTEXT(Forks);

/// A pool of pages of two tokens.
class Prefixes : public Forks {
 protected:
  void make_pool(std::int64_t pages) {
    pool_ = std::make_shared<PagePool>(context_, kOptions, 2, pages);
  }

  KvCache request(const Ids& ids, bool publish = true) {
    KvCache cache = KvCache::paged(pool_);
    extend(cache, tokens_of(ids));
    if (publish) cache.publish_prefix(0, ids);
    return cache;
  }

  /// How many of these tokens a new request finds; they must be the right ones. It leaves at once,
  /// which renews what it found.
  std::int64_t found(const Ids& ids) {
    KvCache cache = KvCache::paged(pool_);
    const std::int64_t count = cache.adopt_prefix(0, ids);
    EXPECT_EQ(cache.length(), count);
    Tokens tokens = tokens_of(ids);
    tokens.resize(static_cast<std::size_t>(count));
    EXPECT_EQ(difference_of(cache, tokens), "");
    return count;
  }

  /// Uses so many pages for something else; give them back by destroying it.
  KvCache occupy(std::int64_t pages) {
    return request(Ids(static_cast<std::size_t>(2 * pages), 7), false);
  }

  std::shared_ptr<PagePool> pool_;
};
LADON_FOR_EACH_CONTEXT(Prefixes);

TEST_P(Prefixes, WhatWasLeftTheLongestAgoGoesFirst) {
  const Ids prompts[] = {{1, 2}, {3, 4}, {5, 6}, {8, 9}};
  const std::size_t order[] = {1, 0, 3, 2};  // in which the requests end
  for (std::size_t taken = 0; taken <= 4; ++taken) {
    make_pool(4);
    std::vector<std::optional<KvCache>> requests;
    for (const Ids& prompt : prompts) requests.emplace_back(request(prompt));
    for (const std::size_t i : order) requests[i].reset();
    EXPECT_EQ(pool_->statistics().kept_pages, 4);
    EXPECT_EQ(pool_->statistics().free_pages, 0);
    const KvCache other = occupy(static_cast<std::int64_t>(taken));
    EXPECT_EQ(pool_->statistics().evictions, static_cast<std::int64_t>(taken));
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(found(prompts[order[i]]), i < taken ? 0 : 2) << taken << " taken, number " << i;
    }
  }
}

TEST_P(Prefixes, WhatIsFoundAgainIsRenewed) {
  make_pool(3);
  for (const Ids& prompt : {Ids{1, 2}, Ids{3, 4}, Ids{5, 6}}) request(prompt);
  EXPECT_EQ(found({1, 2}), 2);
  {
    const KvCache other = occupy(1);
    EXPECT_EQ(found({3, 4}), 0);
  }
  // The free page is used before anything else is given up.
  const KvCache other = occupy(2);
  EXPECT_EQ(found({5, 6}), 0);
  EXPECT_EQ(found({1, 2}), 2);
}

TEST_P(Prefixes, DeeperPagesGoBeforeThoseTheyFollow) {
  const Ids prompt = {1, 2, 3, 4, 5, 6};
  for (std::int64_t taken = 0; taken <= 3; ++taken) {
    make_pool(3);
    request(prompt);
    const KvCache other = occupy(taken);
    EXPECT_EQ(found(prompt), 6 - 2 * taken);
    EXPECT_EQ(pool_->statistics().published_pages, 3 - taken);
  }
}

TEST_P(Prefixes, WithAPageGoesWhatFollowsIt) {
  make_pool(6);
  std::optional<KvCache> first = request({1, 2, 3, 4});
  // Has pages of its own for the same tokens; the third is published behind the first's.
  std::optional<KvCache> second = request({1, 2, 3, 4, 5, 6});
  EXPECT_EQ(pool_->statistics().published_pages, 3);
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6}), 6);
  first.reset();
  EXPECT_EQ(pool_->statistics().kept_pages, 2);
  const KvCache other = occupy(2);  // one page is free
  // The page of {3, 4} is gone, so {5, 6} cannot be found, though a request still holds it.
  EXPECT_EQ(pool_->statistics().published_pages, 1);
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6}), 2);
  EXPECT_EQ(difference_of(*second, tokens_of({1, 2, 3, 4, 5, 6})), "");
  second.reset();
  EXPECT_EQ(pool_->statistics().free_pages, 3);
  EXPECT_EQ(pool_->statistics().kept_pages, 1);
}

TEST_P(Prefixes, TheLongestRunIsFound) {
  make_pool(20);
  const KvCache held = request({1, 2, 3, 4, 5, 6, 7});  // the last page is not full
  EXPECT_EQ(pool_->statistics().published_pages, 3);
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6, 7, 8}), 6);
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6}), 6);
  EXPECT_EQ(found({1, 2, 3, 4, 5}), 4);
  EXPECT_EQ(found({1, 2, 3, 9, 5, 6}), 2);
  EXPECT_EQ(found({1}), 0);
  EXPECT_EQ(found({}), 0);
  EXPECT_EQ(found({2, 1}), 0);
  const PagePool::Statistics statistics = pool_->statistics();
  EXPECT_EQ(statistics.prefix_lookups, 7);
  EXPECT_EQ(statistics.prefix_tokens_found, 18);
  // A longer run from another request goes on from the shorter one.
  const KvCache longer = request({1, 2, 3, 4, 5, 6, 10, 11});
  EXPECT_EQ(found({1, 2, 3, 4, 5, 6, 10, 11}), 8);
}

TEST_P(Prefixes, EqualTokensAfterDifferentPrefixesAreNotConfused) {
  make_pool(20);
  const KvCache first = request({1, 2, 9, 9, 9, 9});
  const KvCache second = request({3, 4, 9, 9});
  EXPECT_EQ(pool_->statistics().published_pages, 5);
  EXPECT_EQ(found({1, 2, 9, 9, 9, 9}), 6);
  EXPECT_EQ(found({3, 4, 9, 9, 9, 9}), 4);  // found() compares what they hold
  EXPECT_EQ(found({9, 9}), 0);
  EXPECT_EQ(found({9, 9, 1, 2}), 0);
}

TEST_P(Prefixes, PublishedPagesAreNeverWritten) {
  make_pool(20);
  const Ids prompt = {1, 2, 3, 4};
  KvCache publisher = request(prompt);
  KvCache adopter = KvCache::paged(pool_);
  EXPECT_EQ(adopter.adopt_prefix(0, prompt), 4);
  EXPECT_EQ(pool_->statistics().shared_pages, 2);
  for (KvCache* cache : {&publisher, &adopter}) {
    cache->truncate(0, 3);
    extend(*cache, tokens_of({1, 2, 3, 5, 6}));
    EXPECT_EQ(difference_of(*cache, tokens_of({1, 2, 3, 5, 6})), "");
    EXPECT_EQ(found(prompt), 4);
  }
  EXPECT_EQ(pool_->statistics().kept_pages, 1);
  pool_->forget_prefixes();
  EXPECT_EQ(found(prompt), 2);  // a page that is in use is still published
  EXPECT_EQ(pool_->statistics().kept_pages, 0);
}

TEST_P(Prefixes, APoolOfKeptPagesIsAsGoodAsAFreeOne) {
  make_pool(4);
  request({1, 2, 3, 4, 5, 6, 7, 8});
  EXPECT_EQ(pool_->statistics().kept_pages, 4);
  EXPECT_EQ(occupy(4).length(), 8);
  EXPECT_EQ(pool_->statistics().free_pages, 4);
}

/// A second fork goes on from a past whose first fork is gone: nothing is copied, as if the first
/// had never been. (It is how drafts are tried, and what forward_from() does.)
TEST_P(Forks, AForkThatIsGoneLeavesNoTrace) {
  for (const std::int64_t page_size : {0, 1, 7, 64}) {
    KvCache past =
        page_size == 0
            ? KvCache::contiguous(context_, kOptions, 100)
            : KvCache::paged(std::make_shared<PagePool>(context_, kOptions, page_size, 40));
    Tokens tokens = tokens_of({1, 2, 3, 4, 5});
    extend(past, tokens);
    std::vector<std::int64_t> first;  // the slots of the first fork
    for (std::int64_t draft = 0; draft < 4; ++draft) {
      Tokens longer = tokens;
      for (std::int64_t i = 0; i < 3; ++i) push_token(longer, 10 * draft + i);
      KvCache fork = past.fork(context_);
      extend(fork, longer);
      const KvCacheView view = fork.view();
      EXPECT_EQ(view.k, past.view().k);
      EXPECT_EQ(difference_of(fork, longer), "");
      std::vector<std::int64_t> slots;
      for (std::int64_t j = 0; j < 8; ++j) slots.push_back(slot_in(view, view.sequences[0], j));
      if (draft == 0) first = slots;
      // New pages of one token each come in any order.
      EXPECT_TRUE(page_size == 1 || slots == first) << "page size " << page_size;
    }
    extend(past, tokens_of({1, 2, 3, 4, 5, 6}));
    EXPECT_EQ(difference_of(past, tokens_of({1, 2, 3, 4, 5, 6})), "");
  }
}

}  // namespace
}  // namespace ladon::test
