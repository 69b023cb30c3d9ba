// Files of caches: between all kinds and back, and damaged ones. cache_format_test.cpp has the
// format itself.
#include <gtest/gtest.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cache/cache_file_support.h"
#include "cache/cache_support.h"
#include "io/io_support.h"
#include "io/memory_file.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

class CacheFiles : public testing::TestWithParam<std::tuple<DType, Place>> {
 protected:
  DType storage() const { return std::get<DType>(GetParam()); }
  std::filesystem::path path() const { return folder_ / "cache"; }
  std::string saved(const KvCache& cache) const {
    cache.save(context_, path());
    return read_bytes(path());
  }
  std::string load_error(KvCache& cache, ErrorCode code = ErrorCode::kIo) const {
    return error_of([&] { cache.load(context_, path()); }, code);
  }

  Context context_ = std::get<Place>(GetParam()).context();
  TempFolder folder_;
};

TEST_P(CacheFiles, ThereAndBackBetweenKinds) {
  const KvCacheOptions options = options_of(storage());
  KvCache first = KvCache::contiguous(context_, options);
  append_random(context_, first, {23, 5}, 1);
  const std::string bytes = saved(first);
  KvCache kinds[] = {paged(context_, options, 1), paged(context_, options, 7),
                     paged(context_, options, 64), KvCache::contiguous(context_, options, 23),
                     KvCache::window(context_, options, 40)};
  for (KvCache& cache : kinds) {
    append_random(context_, cache, {3, 4}, 2);  // is forgotten
    cache.load(context_, path());
    EXPECT_EQ(cache.length(0), 23);
    EXPECT_EQ(cache.length(1), 5);
    EXPECT_EQ(saved(cache), bytes);
    for (std::int64_t b = 0; b < 2; ++b) {
      EXPECT_EQ(content_of(context_, cache, b), content_of(context_, first, b));
    }
  }
  KvCache back = KvCache::contiguous(context_, options);
  back.load(context_, path());
  EXPECT_EQ(saved(back), bytes);
  // And it goes on from there.
  for (KvCache* cache : {&back, &first, &kinds[1]}) append_random(context_, *cache, {70, 2}, 3);
  EXPECT_EQ(saved(back), saved(first));
  EXPECT_EQ(saved(kinds[1]), saved(first));
}

TEST_P(CacheFiles, Windows) {
  const KvCacheOptions options = options_of(storage());
  KvCache window = KvCache::window(context_, options, 6, 3);
  append_random(context_, window, {20, 4}, 1);
  ASSERT_EQ(window.held(0), 9);
  const std::string bytes = saved(window);
  for (const std::int64_t spare : {0, 1, 3, 30}) {
    KvCache other = KvCache::window(context_, options, 6, spare);
    other.load(context_, path());
    EXPECT_EQ(other.length(0), 20);
    EXPECT_EQ(other.held(0), std::min<std::int64_t>(6 + spare, 9));
    const std::vector<double> all = content_of(context_, window, 0);
    const std::vector<double> part = content_of(context_, other, 0);
    EXPECT_TRUE(std::equal(part.rbegin(), part.rend(), all.rbegin()));
    EXPECT_EQ(content_of(context_, other, 1), content_of(context_, window, 1));
    other.truncate(0, 20 - std::min<std::int64_t>(spare, 3));
    append_random(context_, other, {9, 0}, 5);
  }
  KvCache narrower = KvCache::window(context_, options, 5);
  narrower.load(context_, path());
  EXPECT_EQ(narrower.held(0), 5);
  // It holds positions 11 to 19: enough for windows of up to 9.
  KvCache widest = KvCache::window(context_, options, 9);
  EXPECT_NO_THROW(widest.load(context_, path()));
  KvCache wider[] = {KvCache::window(context_, options, 10), KvCache::contiguous(context_, options),
                     paged(context_, options, 3)};
  for (KvCache& cache : wider) {
    append_random(context_, cache, {2, 1}, 7);
    const CacheState before = state_of(context_, cache);
    EXPECT_EQ(load_error(cache),
              "KvCache::load: " + path().string() +
                  ": got sequences whose first tokens were dropped, expected all that a " +
                  std::string(cache.kind()) + " cache with its window can see");
    EXPECT_EQ(state_of(context_, cache), before);
  }
  // A window of a sequence that is not longer than it: nothing was dropped.
  window.reset(0);
  saved(window);
  EXPECT_NO_THROW(wider[1].load(context_, path()));
}

TEST_P(CacheFiles, AContiguousCacheInAWindow) {
  const KvCacheOptions options = options_of(storage());
  KvCache whole = KvCache::contiguous(context_, options);
  append_random(context_, whole, {30, 3}, 1);
  saved(whole);
  KvCache window = KvCache::window(context_, options, 8, 2);
  window.load(context_, path());
  EXPECT_EQ(window.length(0), 30);
  EXPECT_EQ(window.held(0), 10);
  EXPECT_EQ(window.held(1), 3);
  const std::vector<double> all = content_of(context_, whole, 0);
  const std::vector<double> part = content_of(context_, window, 0);
  EXPECT_TRUE(std::equal(part.rbegin(), part.rend(), all.rbegin()));
}

TEST_P(CacheFiles, EmptyOnes) {
  const KvCacheOptions options = options_of(storage(), 0);
  KvCache none = KvCache::contiguous(context_, options);
  EXPECT_EQ(saved(none).size(), 56U);
  KvCache other = KvCache::window(context_, options, 3);
  EXPECT_NO_THROW(other.load(context_, path()));
  KvCache full = KvCache::contiguous(context_, options_of(storage()));
  append_random(context_, full, {2, 3}, 1);
  saved(KvCache::contiguous(context_, options_of(storage())));
  full.load(context_, path());
  EXPECT_EQ(full.length(0) + full.length(1), 0);
}

/// Every byte matters, at every length.
TEST_P(CacheFiles, DamagedFilesAreRefusedAndLoseNothing) {
  const KvCacheOptions options = options_of(storage());
  KvCache source = KvCache::window(context_, options, 4);
  append_random(context_, source, {7, 3}, 1);
  const std::string bytes = saved(source);
  const auto pool = std::make_shared<PagePool>(context_, options, 3, 10);
  KvCache kinds[] = {KvCache::window(context_, options, 4),
                     KvCache::window(context_, options, 2, 1), KvCache::paged(pool, 2),
                     KvCache::contiguous(context_, options)};
  MemoryFile file;
  for (KvCache& cache : kinds) {
    append_random(context_, cache, {5, 2}, 2);
    const CacheState before = state_of(context_, cache);
    const auto expect_refused = [&](const std::string& damaged, const std::string& what) {
      file.set(damaged);
      try {
        cache.load(context_, file.path());
        ADD_FAILURE() << what << " was loaded";
      } catch (const Error& error) {
        EXPECT_TRUE(error.code() == ErrorCode::kIo || error.code() == ErrorCode::kUnsupported);
      }
    };
    for (std::size_t length = 0; length < bytes.size(); ++length) {
      expect_refused(bytes.substr(0, length), "length " + std::to_string(length));
    }
    EXPECT_EQ(state_of(context_, cache), before);
    expect_refused(bytes + '\0', "a byte more");
    for (std::size_t at = 0; at < bytes.size(); ++at) {
      for (const unsigned flip : {0x01U, 0x10U, 0x80U, 0xffU}) {
        std::string damaged = bytes;
        damaged[at] = static_cast<char>(static_cast<unsigned char>(damaged[at]) ^ flip);
        expect_refused(damaged, "byte " + std::to_string(at));
      }
      EXPECT_EQ(state_of(context_, cache), before);
    }
  }
  EXPECT_EQ(pool->statistics().used_pages, 3);
}

INSTANTIATE_TEST_SUITE_P(Storages, CacheFiles,
                         testing::Combine(testing::Values(DType::kF64, DType::kF32, DType::kBF16,
                                                          DType::kF16, DType::kI8, DType::kF8E4M3),
                                          testing::ValuesIn(fastest_places())),
                         [](const auto& one) {
                           return name_of(std::get<DType>(one.param)) + std::string("_") +
                                  std::get<Place>(one.param).name();
                         });

class CacheFile : public ContextTest {};
LADON_FOR_EACH_CONTEXT(CacheFile);

TEST_P(CacheFile, TooFewPagesLoseNothing) {
  const TempFolder folder;
  const KvCacheOptions options = options_of(DType::kF32);
  KvCache large = KvCache::contiguous(context_, options);
  append_random(context_, large, {20, 9}, 1);
  large.save(context_, folder / "cache");
  const auto pool = std::make_shared<PagePool>(context_, options, 4, 10);
  KvCache cache = KvCache::paged(pool, 2);
  append_random(context_, cache, {6, 5}, 2);
  const CacheState before = state_of(context_, cache);
  const std::string message =
      error_of([&] { cache.load(context_, folder / "cache"); }, ErrorCode::kOutOfMemory);
  EXPECT_NE(message.find("got 6 free pages of 10, expected 8"), std::string::npos) << message;
  EXPECT_EQ(state_of(context_, cache), before);
  EXPECT_EQ(pool->statistics().free_pages, 6);
  // The old content counts until the new one is there; without it there is space.
  cache.reset();
  cache.load(context_, folder / "cache");
  EXPECT_EQ(content_of(context_, cache, 0), content_of(context_, large, 0));
  EXPECT_EQ(pool->statistics().free_pages, 2);
  KvCache small = KvCache::contiguous(context_, options, 19);
  const std::string full = error_of([&] { small.load(context_, folder / "cache"); });
  EXPECT_NE(full.find("got a sequence of 20 tokens, expected at most the cache's capacity of 19"),
            std::string::npos)
      << full;
}

/// Loading may give up prefixes that are unowned, but not for a file that turns out to be damaged.
TEST_P(CacheFile, ADamagedFileCostsNoPrefix) {
  const TempFolder folder;
  const KvCacheOptions options = options_of(DType::kF32, 1);
  const auto pool = std::make_shared<PagePool>(context_, options, 2, 4);
  const std::vector<std::int64_t> ids = {1, 2, 3, 4};
  KvCache cache = KvCache::paged(pool);
  append_random(context_, cache, {4}, 1);
  cache.publish_prefix(0, ids);
  cache.reset();
  KvCache source = KvCache::contiguous(context_, options);
  append_random(context_, source, {8}, 2);
  source.save(context_, folder / "sound");
  std::string bytes = read_bytes(folder / "sound");
  bytes[bytes.size() / 2] = static_cast<char>(bytes[bytes.size() / 2] ^ 1);
  write_bytes(folder / "damaged", bytes);
  error_of([&] { cache.load(context_, folder / "damaged"); }, ErrorCode::kIo);
  EXPECT_EQ(pool->statistics().kept_pages, 2);
  EXPECT_EQ(pool->statistics().evictions, 0);
  EXPECT_EQ(cache.adopt_prefix(0, ids), 4);
  cache.reset();
  cache.load(context_, folder / "sound");
  EXPECT_EQ(pool->statistics().evictions, 2);
}

}  // namespace
}  // namespace ladon::test
