// parallel_for, the thread pool below it, and the scratch memory that its callers use.
#include "core/parallel.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "core/context_impl.h"
#include "core/thread_pool.h"
#include "core/workspace_pool.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::error_of;

Context with_threads(int num_threads) {
  ContextOptions options;
  options.num_threads = num_threads;
  options.isa = Isa::kReference;
  return Context(options);
}

/// Runs `count` tasks and expects each exactly once, and never two at once with one worker number.
void expect_each_once(const Context& context, std::int64_t count) {
  std::vector<std::atomic<int>> calls(static_cast<std::size_t>(count));
  std::vector<std::atomic<int>> busy(static_cast<std::size_t>(context.num_threads()));
  std::atomic<int> clashes{0};
  parallel_for(context.impl().workers(), count, [&](std::int64_t task, int worker) {
    auto& mine = busy.at(static_cast<std::size_t>(worker));
    if (mine.fetch_add(1) != 0) ++clashes;
    ++calls.at(static_cast<std::size_t>(task));
    mine.fetch_sub(1);
  });
  EXPECT_EQ(clashes, 0);
  for (const std::atomic<int>& number : calls) ASSERT_EQ(number, 1);
}

class ParallelFor : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(ThreadCounts, ParallelFor, testing::Values(1, 2, 3, 7));

/// Its thread's loops do it between their tasks, on that thread alone.
TEST_P(ParallelFor, SideWorkIsDoneBetweenTasks) {
  const Context context = with_threads(GetParam());
  const auto caller = std::this_thread::get_id();
  std::atomic<int> tasks{0};
  const auto loop = [&] {
    interruptible_for(context.impl().workers(), 100, [&](std::int64_t, int) { ++tasks; });
  };
  int done = 0;
  int elsewhere = 0;
  {
    const SideWork outer([] { FAIL() << "there is a later one"; });
    {
      const SideWork work([&] {
        ++done;
        if (std::this_thread::get_id() != caller) ++elsewhere;
      });
      loop();
    }
  }
  EXPECT_EQ(tasks, 100);
  EXPECT_EQ(elsewhere, 0);
  if (GetParam() == 1) {
    EXPECT_EQ(done, 99);
  }
  const int before = done;
  loop();
  EXPECT_EQ(done, before);  // it is gone
}

TEST(ParallelForTest, WhatSideWorkThrowsEndsTheLoop) {
  const Context context = with_threads(1);
  int tasks = 0;
  const SideWork work([&] {
    if (tasks == 3) throw std::runtime_error("stop");
  });
  EXPECT_THROW(
      interruptible_for(context.impl().workers(), 100, [&](std::int64_t, int) { ++tasks; }),
      std::runtime_error);
  EXPECT_EQ(tasks, 3);
}

TEST_P(ParallelFor, RunsEveryIndexOnce) {
  const Context context = with_threads(GetParam());
  for (const std::int64_t count : {0, 1, 2, 3, 6, 7, 8, 1000}) expect_each_once(context, count);
  parallel_for(context.impl().workers(), -5,
               [](std::int64_t, int) { FAIL() << "there is nothing to do"; });
}

TEST_P(ParallelFor, Repeats) {
  const Context context = with_threads(GetParam());
  for (int i = 0; i < 500; ++i) expect_each_once(context, 9);
}

TEST_P(ParallelFor, Nests) {
  const Context context = with_threads(GetParam());
  std::atomic<int> calls{0};
  parallel_for(context.impl().workers(), 5, [&](std::int64_t, int) {
    parallel_for(context.impl().workers(), 6, [&](std::int64_t, int) {
      parallel_for(context.impl().workers(), 7, [&](std::int64_t, int) { ++calls; });
    });
  });
  EXPECT_EQ(calls, 5 * 6 * 7);
}

TEST_P(ParallelFor, ServesManyCallersAtOnce) {
  const Context context = with_threads(GetParam());
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 8; ++caller) {
    callers.emplace_back([&context, caller] {
      for (int i = 0; i < 50; ++i) expect_each_once(context, 1 + (caller + i) % 20);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

TEST_P(ParallelFor, RethrowsAndStaysUsable) {
  const Context context = with_threads(GetParam());
  for (int round = 0; round < 20; ++round) {
    std::atomic<int> calls{0};
    try {
      parallel_for(context.impl().workers(), 1000, [&](std::int64_t task, int) {
        ++calls;
        if (task == 3) throw std::runtime_error("task 3");
      });
      FAIL() << "nothing was thrown";
    } catch (const std::runtime_error& error) {
      EXPECT_STREQ(error.what(), "task 3");
    }
    EXPECT_GE(calls, 4);
  }
  try {
    parallel_for(context.impl().workers(), 100,
                 [](std::int64_t, int) { throw std::runtime_error("all of them"); });
    FAIL() << "nothing was thrown";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "all of them");
  }
  expect_each_once(context, 100);
}

TEST_P(ParallelFor, NestedExceptionsReachTheCaller) {
  const Context context = with_threads(GetParam());
  EXPECT_THROW(parallel_for(context.impl().workers(), 4,
                            [&](std::int64_t, int) {
                              parallel_for(context.impl().workers(), 4, [](std::int64_t task, int) {
                                if (task == 2) throw std::logic_error("inner");
                              });
                            }),
               std::logic_error);
}

TEST_P(ParallelFor, WorksInAForkedChild) {
  // Once with the threads already running, and once before they were ever needed.
  for (const bool started : {true, false}) {
    Context context = with_threads(GetParam());
    if (started) expect_each_once(context, 100);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      alarm(60);  // a hang must not outlive the test
      std::atomic<int> calls{0};
      parallel_for(context.impl().workers(), 100, [&](std::int64_t, int) { ++calls; });
      // Its end must not wait for threads that the child does not have.
      { const Context ends = std::move(context); }
      _exit(calls == 100 ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status)) << "signal " << (WIFSIGNALED(status) ? WTERMSIG(status) : 0);
    EXPECT_EQ(WEXITSTATUS(status), 0);
    expect_each_once(context, 100);  // the parent does not mind
  }
}

/// Starts a thread for every body: as unlike the pool as can be.
class ThreadPerBody final : public Executor {
 public:
  int concurrency() const noexcept override { return 4; }
  void run(int count, void (*body)(void* state, int index), void* state) override {
    ++runs;
    std::vector<std::thread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back(body, state, i);
    for (std::thread& thread : threads) thread.join();
  }

  std::atomic<int> runs{0};
};

TEST(Executors, TheHostsOwnIsUsed) {
  ThreadPerBody executor;
  ContextOptions options;
  options.executor = &executor;
  options.isa = Isa::kReference;
  const Context context(options);
  EXPECT_EQ(context.num_threads(), 4);
  expect_each_once(context, 100);
  EXPECT_EQ(executor.runs, 1);
  expect_each_once(context, 1);  // nothing to share
  EXPECT_EQ(executor.runs, 1);
  EXPECT_THROW(parallel_for(context.impl().workers(), 10,
                            [](std::int64_t, int) { throw std::logic_error("x"); }),
               std::logic_error);
}

TEST(ThreadPoolTest, RunsMoreIndicesThanThreads) {
  ThreadPool pool(3);
  EXPECT_EQ(pool.concurrency(), 3);
  for (const int count : {0, 1, 2, 3, 50}) {
    std::vector<std::atomic<int>> calls(50);
    pool.run(
        count,
        [](void* state, int index) {
          ++(*static_cast<std::vector<std::atomic<int>>*>(state))
                .at(static_cast<std::size_t>(index));
        },
        &calls);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)], i < count ? 1 : 0);
  }
}

TEST(ThreadPoolTest, UsesSeveralThreads) {
  // Two bodies that wait for each other can only end on two threads.
  ThreadPool pool(2);
  std::atomic<int> arrived{0};
  pool.run(
      2,
      [](void* state, int) {
        auto& count = *static_cast<std::atomic<int>*>(state);
        ++count;
        while (count < 2) std::this_thread::yield();
      },
      &arrived);
  EXPECT_EQ(arrived, 2);
}

#if defined(__GLIBC__)
TEST(ThreadPoolTest, DoesAllTheWorkItselfWhereNoThreadCanBeStarted) {
  // A stack as large as the address space: no thread can have it.
  pthread_attr_t before;
  ASSERT_EQ(pthread_getattr_default_np(&before), 0);
  pthread_attr_t greedy;
  ASSERT_EQ(pthread_attr_init(&greedy), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&greedy, std::size_t{1} << 47), 0);
  ASSERT_EQ(pthread_setattr_default_np(&greedy), 0);
  EXPECT_THROW(std::thread([] {}).join(), std::system_error);
  {
    const Context context = with_threads(4);
    expect_each_once(context, 100);
    expect_each_once(context, 100);
  }
  ASSERT_EQ(pthread_setattr_default_np(&before), 0);
  pthread_attr_destroy(&greedy);
  pthread_attr_destroy(&before);
}
#endif

TEST(ThreadPoolTest, ItsThreadsLeaveSignalsToTheHost) {
  ThreadPool pool(2);
  struct State {
    std::atomic<int> arrived{0};
    std::atomic<int> open_elsewhere{0};
    std::thread::id caller = std::this_thread::get_id();
  } state;
  pool.run(
      2,
      [](void* opaque, int) {
        auto& shared = *static_cast<State*>(opaque);
        if (std::this_thread::get_id() != shared.caller) {
          sigset_t mask;
          pthread_sigmask(SIG_SETMASK, nullptr, &mask);
          if (sigismember(&mask, SIGINT) == 0) ++shared.open_elsewhere;
        }
        ++shared.arrived;
        while (shared.arrived < 2) std::this_thread::yield();
      },
      &state);
  EXPECT_EQ(state.open_elsewhere, 0);
  sigset_t mask;
  pthread_sigmask(SIG_SETMASK, nullptr, &mask);
  EXPECT_EQ(sigismember(&mask, SIGINT), 0);  // the caller's own mask is as it was
}

TEST(WorkspaceTest, GivesTheSameMemoryAgain) {
  WorkspacePool pool(host_memory());
  std::byte* first = nullptr;
  {
    const Workspace workspace(pool, 1000);
    first = workspace.data();
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(first) % 64, 0U);
    std::fill_n(first, 1000, std::byte{1});
  }
  {
    const Workspace same(pool, 900);
    EXPECT_EQ(same.data(), first);
    const Workspace other(pool, 900);  // while the first is in use
    EXPECT_NE(other.data(), first);
  }
  const Workspace nothing(pool, 0);
  EXPECT_EQ(nothing.data(), nullptr);
}

TEST(WorkspaceTest, TakesTheSmallestThatFits) {
  WorkspacePool pool(host_memory());
  const WorkspacePool::Allocation small = pool.take(1 << 10);
  const WorkspacePool::Allocation large = pool.take(1 << 20);
  pool.give_back(large);
  pool.give_back(small);
  const WorkspacePool::Allocation again = pool.take(1000);
  EXPECT_EQ(again.data, small.data);
  const WorkspacePool::Allocation middle = pool.take(2000);
  EXPECT_EQ(middle.data, large.data);
  EXPECT_GE(middle.size, 2000U);
  pool.give_back(again);
  pool.give_back(middle);
}

TEST(WorkspaceTest, KeepsTheLargerOfManyAndNoneThatIsHuge) {
  WorkspacePool pool(host_memory());
  std::vector<WorkspacePool::Allocation> blocks;
  for (int i = 0; i < 20; ++i) blocks.push_back(pool.take(std::size_t{64} << (i % 10)));
  for (const WorkspacePool::Allocation& block : blocks) pool.give_back(block);
  // The leak checker sees to the rest; the largest of them must be among those kept.
  const WorkspacePool::Allocation largest = pool.take(std::size_t{64} << 9);
  EXPECT_TRUE(largest.data == blocks[9].data || largest.data == blocks[19].data);
  pool.give_back(largest);
  pool.give_back(pool.take((std::size_t{32} << 20) + 1));
  pool.give_back({});
}

TEST(WorkspaceTest, SaysHowMuchMemoryItWanted) {
  WorkspacePool pool(host_memory());
  EXPECT_EQ(error_of([&] { pool.take(std::size_t{1} << 60); }, ErrorCode::kOutOfMemory),
            "workspace: size: got 1152921504606846976 bytes of scratch, expected a size that fits "
            "the memory");
}

TEST(WorkspaceTest, ServesManyThreads) {
  WorkspacePool pool(host_memory());
  std::vector<std::thread> threads;
  std::atomic<int> torn{0};
  for (int t = 0; t < 6; ++t) {
    threads.emplace_back([&pool, &torn, t] {
      for (int i = 0; i < 300; ++i) {
        const std::size_t size = 100 + static_cast<std::size_t>(i) * 7;
        const Workspace workspace(pool, size);
        std::fill_n(workspace.data(), size, static_cast<std::byte>(t));
        for (std::size_t k = 0; k < size; ++k) {
          if (workspace.data()[k] != static_cast<std::byte>(t)) ++torn;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(torn, 0);
}

}  // namespace
}  // namespace ladon
