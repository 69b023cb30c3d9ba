// Faults: whichever allocation fails, and wherever the disk is full, every cache and the pool are
// as they were, and no page is lost.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "cache/cache_support.h"
#include "io/io_support.h"
#include "ladon/error.h"
#include "ladon/multi_head_attention.h"
#include "support/error_of.h"
#include "support/failing_allocator.h"
#include "support/full_disk.h"
#include "support/host_context.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

/// Caches that an operation works on, and the pool that they may have.
struct World {
  std::shared_ptr<PagePool> pool;
  std::vector<KvCache> caches;
};

/// Everything that can be seen of them.
struct WorldState {
  std::vector<CacheState> caches;
  std::vector<std::vector<std::int32_t>> tables;
  std::array<std::int64_t, 9> pool{};
  bool operator==(const WorldState&) const = default;
};

WorldState world_state(const World& world) {
  WorldState state;
  for (const KvCache& cache : world.caches) {
    state.caches.push_back(state_of(cache));
    const KvCacheView view = cache.view();
    for (const KvSequenceView& sequence : view.sequences) {
      if (view.page_size == 0) continue;
      const std::int64_t pages = (sequence.length + view.page_size - 1) / view.page_size;
      state.tables.emplace_back(sequence.pages, sequence.pages + pages);
    }
  }
  if (world.pool != nullptr) {
    const PagePool::Statistics s = world.pool->statistics();
    state.pool = {s.free_pages,     s.kept_pages,          s.used_pages,
                  s.shared_pages,   s.published_pages,     s.evictions,
                  s.prefix_lookups, s.prefix_tokens_found, s.num_pages};
  }
  return state;
}

const std::vector<std::int64_t> kPrompt = {1, 2, 3, 4, 5, 6, 7, 8, 9};

MultiHeadAttention make_layer(bool window) {
  MultiHeadAttentionOptions options{
      .embed_dim = 8, .num_heads = 4, .num_kv_heads = 2, .head_dim = 6, .causal = true};
  if (window) options.window_left = 10;
  return MultiHeadAttention(options, 5);
}

class Faults : public testing::TestWithParam<std::string> {
 protected:
  /// Two sequences of 20 and 17 tokens; a fork of them that has gone on; and an empty cache of as
  /// many. In a pool there is a prefix besides that is unowned.
  World make_world() const {
    World world;
    const std::string kind = GetParam();
    const KvCacheOptions options = make_layer(false).cache_options(2);
    if (kind == "paged") {
      world.pool = std::make_shared<PagePool>(host_context(), options, 3, 100);
      KvCache cache = KvCache::paged(world.pool);
      const Tensor x = random_tensor(DType::kF32, {1, 9, 2, 6}, 4);
      cache.append(host_context(), x, x);
      cache.publish_prefix(0, kPrompt);
    }
    const auto make = [&] {
      if (kind == "paged") return KvCache::paged(world.pool, 2);
      if (kind == "window") return KvCache::window(host_context(), options, 10, 2);
      return KvCache::contiguous(host_context(), options);
    };
    world.caches.push_back(make());
    append(world.caches[0], {20, 17}, 1);
    world.caches.push_back(world.caches[0].fork(host_context()));
    append(world.caches[1], {3, 2}, 2);
    world.caches.push_back(make());
    return world;
  }

  /// Without an allocation of the test's own: the faults are the library's.
  void append(KvCache& cache, const std::vector<std::int64_t>& counts, std::size_t source) const {
    const Tensor& x = sources_[source];
    cache.append(host_context(), x, x, counts);
  }

  /// Runs an operation with the first, the second, ... allocation failing, until none is left to
  /// fail; in between all is as before. In the end, all is as without faults.
  void expect_all_or_nothing(const std::string& name, const std::function<void(World&)>& operation,
                             int least) const {
    SCOPED_TRACE(GetParam() + ", " + name);
    World sound = make_world();
    sound.caches.reserve(10);
    operation(sound);
    const WorldState wanted = world_state(sound);
    for (const bool from_then_on : {false, true}) {
      std::unique_ptr<World> world;
      int failures = 0;
      for (int n = 0;; ++n) {
        ASSERT_LT(n, 2000) << "no end";
        if (world == nullptr) {
          world = std::make_unique<World>(make_world());
          world->caches.reserve(10);
        }
        const WorldState before = world_state(*world);
        bool done = false;
        fail_allocation(n, from_then_on);
        try {
          operation(*world);
          done = true;
        } catch (const std::bad_alloc&) {
        } catch (const Error& error) {
          const bool failed = stop_failing();
          EXPECT_TRUE(failed && error.code() == ErrorCode::kOutOfMemory) << error.what();
        }
        const bool failed = stop_failing();
        EXPECT_TRUE(done || failed);
        if (!done) {
          ++failures;
          ASSERT_TRUE(world_state(*world) == before) << "allocation " << n;
          continue;
        }
        WorldState after = world_state(*world);
        after.tables = wanted.tables;  // pages that came back are taken in another order
        ASSERT_TRUE(after == wanted) << "allocation " << n;
        if (!failed) break;
        world.reset();  // done in spite of it, as with a thread less: there may be more to come
      }
      EXPECT_GE(failures, least);
      if (world->pool != nullptr) {
        world->caches.clear();
        world->pool->forget_prefixes();
        EXPECT_EQ(world->pool->statistics().free_pages, 100);
      }
    }
  }

  bool is(const std::string& kind) const { return GetParam() == kind; }

  TempFolder folder_;
  std::vector<Tensor> sources_ = [] {
    std::vector<Tensor> sources;
    for (std::uint64_t i = 0; i < 3; ++i) {
      sources.push_back(random_tensor(DType::kF32, {2, 150, 2, 6}, i));
    }
    return sources;
  }();
};

TEST_P(Faults, Construction) {
  const KvCacheOptions options = make_layer(false).cache_options(2);
  expect_all_or_nothing(
      "construct",
      [&](World& world) {
        if (is("paged")) {
          const PagePool other(host_context(), options, 3, 20);
          world.caches.push_back(KvCache::paged(world.pool, 2));
        } else {
          world.caches.push_back(is("window") ? KvCache::window(host_context(), options, 10, 2)
                                              : KvCache::contiguous(host_context(), options, 30));
        }
      },
      5);
}

TEST_P(Faults, Appends) {
  const std::vector<std::int64_t> one = {1, 1};
  const std::vector<std::int64_t> many = {150, 2};
  // The fork has gone on, so that the first cache must copy; or it is the fork that goes on.
  expect_all_or_nothing(
      "copy on write", [&](World& world) { append(world.caches[0], one, 0); },
      is("contiguous") ? 3 : 0);
  expect_all_or_nothing(
      "one more", [&](World& world) { append(world.caches[1], one, 0); }, 0);
  expect_all_or_nothing(
      "chunk", [&](World& world) { append(world.caches[0], many, 0); }, 1);
  expect_all_or_nothing(
      "first chunk", [&](World& world) { append(world.caches[2], many, 0); }, 1);
  expect_all_or_nothing(
      "two steps",
      [&](World& world) {
        const Tensor& x = sources_[0];
        { const KvAppend abandoned(host_context(), world.caches[0], x, x, one); }
        KvAppend append(host_context(), world.caches[0], x, x, many);
        append.commit();
      },
      1);
}

TEST_P(Faults, ForkReorderReserve) {
  expect_all_or_nothing(
      "fork", [](World& world) { world.caches.push_back(world.caches[0].fork(host_context())); },
      3);
  const std::vector<std::int64_t> from = {1, 0, 1};
  expect_all_or_nothing(
      "reorder", [&](World& world) { world.caches[0].reorder(host_context(), from); }, 3);
  expect_all_or_nothing(
      "reserve", [](World& world) { world.caches[0].reserve(host_context(), 170); },
      is("window") ? 0 : 2);
  expect_all_or_nothing(
      "truncate and reset",
      [](World& world) {
        world.caches[0].truncate(0, 19);
        world.caches[0].reset(1);
        world.caches[1].reset();
      },
      0);
}

TEST_P(Faults, SaveAndLoad) {
  const std::filesystem::path path = folder_ / "cache";
  make_world().caches[1].save(host_context(), path);
  const std::string old = read_bytes(path);
  World world = make_world();
  world.caches[0].save(host_context(), path);
  const std::string wanted = read_bytes(path);
  expect_all_or_nothing(
      "save",
      [&](World& saved) {
        write_bytes(path, old);
        try {
          saved.caches[0].save(host_context(), path);
        } catch (...) {
          stop_failing();
          // Whole in any case, and nothing next to it. (The new one may be there already, when the
          // last allocation fails, that of the folder's name.)
          const std::string now = read_bytes(path);
          EXPECT_TRUE(now == old || now == wanted);
          EXPECT_EQ(folder_.files(), std::vector<std::string>{"cache"});
          throw;
        }
      },
      3);
  EXPECT_EQ(read_bytes(path), wanted);
  expect_all_or_nothing(
      "load into another", [&](World& loaded) { loaded.caches[2].load(host_context(), path); }, 5);
  expect_all_or_nothing(
      "load over one", [&](World& loaded) { loaded.caches[1].load(host_context(), path); }, 5);
}

TEST_P(Faults, Prefixes) {
  if (!is("paged")) return;
  std::vector<std::int64_t> ids(20);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(50 + i);
  expect_all_or_nothing(
      "publish", [&](World& world) { world.caches[0].publish_prefix(0, ids); }, 0);
  expect_all_or_nothing(
      "adopt", [&](World& world) { EXPECT_EQ(world.caches[2].adopt_prefix(1, kPrompt), 9); }, 1);
  expect_all_or_nothing(
      "forget", [&](World& world) { world.pool->forget_prefixes(); }, 0);
}

TEST_P(Faults, Layers) {
  const MultiHeadAttention layer = make_layer(is("window"));
  const Tensor x = random_tensor(DType::kF32, {2, 7, 8}, 9);
  const Tensor one = random_tensor(DType::kF32, {2, 1, 8}, 9);
  const std::vector<std::int64_t> ragged = {7, 3};
  expect_all_or_nothing(
      "forward of a chunk, in a fresh context",
      [&](World& world) {
        const Context context(ContextOptions{.num_threads = 2});
        layer.forward(context, x, world.caches[0], {.new_lengths = ragged});
      },
      6);
  const Context context(ContextOptions{.num_threads = 2});
  expect_all_or_nothing(
      "forward of one token", [&](World& world) { layer.forward(context, one, world.caches[1]); },
      1);
  expect_all_or_nothing(
      "forward_from",
      [&](World& world) {
        world.caches.push_back(layer.forward_from(context, x, world.caches[0]).cache);
      },
      4);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Faults, testing::Values("contiguous", "window", "paged"),
                         [](const auto& kind) { return kind.param; });

/// Kept prefixes that were dropped for a call's memory do not come back when the call fails later;
/// that memory is free then, and all that is held is as before.
TEST(CacheFaults, AForwardThatFailsAfterItEvicted) {
  const MultiHeadAttention layer = make_layer(false);
  World world;
  world.pool = std::make_shared<PagePool>(host_context(), layer.cache_options(), 3, 4);
  const Tensor x = random_tensor(DType::kF32, {1, 9, 2, 6}, 4);
  {
    KvCache cache = KvCache::paged(world.pool);
    cache.append(host_context(), x, x);
    cache.publish_prefix(0, kPrompt);
  }
  world.caches.push_back(KvCache::paged(world.pool));
  const Tensor tokens = random_tensor(DType::kF32, {11, 8}, 3);
  const CacheState before = state_of(world.caches[0]);
  for (int n = 0;; ++n) {
    ASSERT_LT(n, 2000);
    fail_allocation(n, false);
    try {
      const Context context(ContextOptions{.num_threads = 1});
      layer.forward(context, tokens, world.caches[0]);
      stop_failing();
      break;
    } catch (const std::exception&) {
      stop_failing();
    }
    EXPECT_EQ(state_of(world.caches[0]), before);
    EXPECT_EQ(world.pool->statistics().used_pages, 0);
    EXPECT_EQ(world.pool->statistics().free_pages + world.pool->statistics().kept_pages, 4);
  }
  EXPECT_EQ(world.caches[0].length(), 11);
}

TEST(CacheFaults, ADiskThatFillsUpLeavesTheOldFile) {
  const TempFolder folder;
  const std::filesystem::path path = folder / "cache";
  // Larger than what is gathered before it is written, with pieces that are larger and smaller.
  const KvCacheOptions options{.batch = 2, .num_kv_heads = 4, .head_dim = 64};
  const Tensor x = random_tensor(DType::kF32, {2, 600, 4, 64}, 1);
  const auto pool = std::make_shared<PagePool>(host_context(), options, 16, 200);
  KvCache caches[] = {KvCache::contiguous(host_context(), options),
                      KvCache::window(host_context(), options, 400), KvCache::paged(pool, 2)};
  for (KvCache& cache : caches) {
    cache.append(host_context(), x, x);
    cache.save(host_context(), path);
    const auto size = std::filesystem::file_size(path);
    EXPECT_GT(size, std::uintmax_t{1} << 20U);
    write_bytes(path, "old");
    const CacheState before = state_of(cache);
    for (const rlim_t limit :
         {rlim_t{0}, rlim_t{1}, rlim_t{55}, rlim_t{4096}, (rlim_t{1} << 20U) - 1, rlim_t{1} << 20U,
          (rlim_t{1} << 20U) + 1, rlim_t{size / 2}, rlim_t{size - 9}, rlim_t{size - 1}}) {
      std::string message;
      {
        const FullDisk full(limit);
        message = error_of([&] { cache.save(host_context(), path); }, ErrorCode::kIo);
      }
      EXPECT_TRUE(message.starts_with("KvCache::save: " + path.string() +
                                      ": got \"File too large\", expected to write "))
          << message;
      EXPECT_EQ(read_bytes(path), "old") << limit;
      EXPECT_EQ(folder.files(), std::vector<std::string>{"cache"});
      EXPECT_EQ(state_of(cache), before);
    }
    const FullDisk just_enough(size);
    EXPECT_NO_THROW(cache.save(host_context(), path));
    EXPECT_EQ(std::filesystem::file_size(path), size);
  }
}

}  // namespace
}  // namespace ladon::test
