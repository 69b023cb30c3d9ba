// fork() while another thread works: the child can use what both share, and nothing is torn.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "ladon/kv_cache.h"
#include "ladon/paged_kv_cache.h"
#include "ladon/safetensors.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

constexpr int kForks = 200;

const KvCacheOptions kOptions{.num_kv_heads = 1, .head_dim = 4};

/// Forks again and again while a thread repeats `busy`; each child runs `use` and must end well.
void expect_children_to_end(const std::function<void()>& busy, const std::function<bool()>& use) {
  std::atomic<bool> stop{false};
  std::thread thread([&] {
    while (!stop) busy();
  });
  int failures = 0;
  for (int i = 0; i < kForks && failures == 0; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);  // a hang must not outlive the test
      bool good = false;
      try {
        good = use();
      } catch (...) {
      }
      _exit(good ? 0 : 1);
    }
    int status = -1;
    const bool waited = child > 0 && waitpid(child, &status, 0) == child;
    if (!waited || !WIFEXITED(status) || WEXITSTATUS(status) != 0) ++failures;
  }
  stop = true;
  thread.join();
  EXPECT_EQ(failures, 0);
}

TEST(Fork, PagePool) {
  const Context context({.num_threads = 1});
  const auto pool = std::make_shared<PagePool>(context, kOptions, 2, 64);
  const Tensor k(DType::kF32, {1, 8, 1, 4});
  expect_children_to_end(
      [&] {
        KvCache cache = KvCache::paged(pool);
        cache.append(context, k, k);
        // The pool's lock is held for most of the time, so that some forks meet it.
        for (int i = 0; i < 200; ++i) pool->statistics();
      },
      [&] {
        const PagePool::Statistics before = pool->statistics();
        const bool whole =
            before.free_pages + before.kept_pages + before.used_pages == before.num_pages;
        KvCache cache = KvCache::paged(pool);
        cache.append(context, k, k);
        return whole && pool->statistics().used_pages == before.used_pages + 4;
      });
}

TEST(Fork, ContiguousCache) {
  const Context context({.num_threads = 1});
  KvCache cache = KvCache::contiguous(context, kOptions);
  const Tensor k(DType::kF32, {1, 8, 1, 4});
  cache.append(context, k, k);
  expect_children_to_end([&] { const KvCache other = cache.fork(context); },
                         [&] {
                           KvCache other = cache.fork(context);
                           other.append(context, k, k);
                           return other.length() == 16;
                         });
}

TEST(Fork, ShardedSafetensors) {
  const TempFolder folder;
  const Tensor weight(DType::kF32, {4});
  const SafetensorsItem items[] = {{"weight", weight}};
  write_safetensors(folder / "model.safetensors", items);
  const ShardedSafetensors shards = ShardedSafetensors::open(folder.path());
  expect_children_to_end(
      [&] { shards.entry("weight"); },
      [&] { return shards.entry("weight").shape == std::vector<std::int64_t>{4}; });
}

}  // namespace
}  // namespace ladon::test
