// Contexts: how many threads, and what LADON_ISA may say.
#include "ladon/context.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include "core/context_impl.h"
#include "core/cpu_count.h"
#include "cpu/cpu_features.h"
#include "cpu/dispatch.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::error_of;

class ContextTest : public testing::Test {
 protected:
  void SetUp() override { unsetenv("LADON_ISA"); }
  void TearDown() override { unsetenv("LADON_ISA"); }
};

Context with_threads(int num_threads) {
  ContextOptions options;
  options.num_threads = num_threads;
  return Context(options);
}

TEST_F(ContextTest, TakesTheThreadsItIsGiven) {
  for (const int threads : {1, 2, 7, 1024}) {
    EXPECT_EQ(with_threads(threads).num_threads(), threads);
  }
}

TEST_F(ContextTest, TakesAllUsableCpusByDefault) {
  EXPECT_EQ(Context().num_threads(), std::min(usable_cpu_count(), 1024));
  EXPECT_GE(usable_cpu_count(), 1);
}

TEST_F(ContextTest, FollowsTheAffinityMask) {
  cpu_set_t before;
  if (sched_getaffinity(0, sizeof(before), &before) != 0) GTEST_SKIP() << "more CPUs than a mask";
  std::size_t first = 0;
  while (!CPU_ISSET(first, &before)) ++first;
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(first, &one);
  if (sched_setaffinity(0, sizeof(one), &one) != 0) GTEST_SKIP() << "affinity may not be set here";
  EXPECT_EQ(usable_cpu_count(), 1);
  EXPECT_EQ(Context().num_threads(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST_F(ContextTest, RefusesImpossibleThreadCounts) {
  EXPECT_EQ(error_of([] { with_threads(-1); }),
            "Context: num_threads: got -1, expected 0 (all that may be used) to 1024");
  EXPECT_EQ(error_of([] { with_threads(1025); }),
            "Context: num_threads: got 1025, expected 0 (all that may be used) to 1024");
}

class FixedExecutor final : public Executor {
 public:
  explicit FixedExecutor(int concurrency) : concurrency_(concurrency) {}
  int concurrency() const noexcept override { return concurrency_; }
  void run(int count, void (*body)(void* state, int index), void* state) override {
    for (int i = 0; i < count; ++i) body(state, i);
  }

 private:
  int concurrency_;
};

TEST_F(ContextTest, AnExecutorDecidesTheThreads) {
  FixedExecutor executor(5);
  ContextOptions options;
  options.executor = &executor;
  options.num_threads = -3;  // ignored
  const Context context(options);
  EXPECT_EQ(context.num_threads(), 5);
  EXPECT_EQ(&context.impl().workers().executor(), &executor);
  FixedExecutor broken(0);
  options.executor = &broken;
  EXPECT_EQ(error_of([&] { const Context refused(options); }),
            "Context: executor: got a concurrency() of 0, expected 1 or more");
}

TEST_F(ContextTest, Moves) {
  Context first = with_threads(3);
  const Context::Impl* const inside = &first.impl();
  Context second = std::move(first);
  EXPECT_EQ(&second.impl(), inside);
  second = with_threads(2);
  EXPECT_EQ(second.num_threads(), 2);
}

TEST_F(ContextTest, AnEmptyLadonIsaIsNone) {
  const Isa fastest = Context().isa();
  setenv("LADON_ISA", "", 1);
  EXPECT_EQ(Context().isa(), fastest);
}

// A machine that the messages are the same for, whatever runs the test.
cpu::CpuFeatures avx2_machine() {
  return {.avx2 = true, .fma = true, .f16c = true, .os_saves_ymm = true, .os_saves_zmm = true};
}

const std::string kChoices =
    ", expected one that can run here: reference, baseline, avx2; avx512 cannot: the CPU lacks "
    "avx512f, avx512bw, avx512dq, avx512vl; avx512_bf16 cannot: the CPU lacks avx512f, avx512bw, "
    "avx512dq, avx512vl; amx cannot: the CPU lacks avx512f, avx512bw, avx512dq, avx512vl";

TEST_F(ContextTest, ChoosesTheFastestThatTheMachineRuns) {
  EXPECT_EQ(cpu::choose_isa({}, avx2_machine()), Isa::kAvx2);
  EXPECT_EQ(cpu::choose_isa({}, cpu::CpuFeatures{}), Isa::kBaseline);
  EXPECT_EQ(cpu::choose_isa(Isa::kBaseline, avx2_machine()), Isa::kBaseline);
  setenv("LADON_ISA", "baseline", 1);
  EXPECT_EQ(cpu::choose_isa({}, avx2_machine()), Isa::kBaseline);
  EXPECT_EQ(cpu::choose_isa(Isa::kAvx2, avx2_machine()), Isa::kAvx2);
}

TEST_F(ContextTest, RefusesAnUnknownLadonIsa) {
  setenv("LADON_ISA", "avx9", 1);
  EXPECT_EQ(error_of([] { cpu::choose_isa({}, avx2_machine()); }),
            "Context: LADON_ISA: got \"avx9\", which is not an instruction set of this library" +
                kChoices);
  const std::string here =
      "LADON_ISA: got \"avx9\", which is not an instruction set of this library, expected one that "
      "can "
      "run here: reference, baseline";
  EXPECT_EQ(error_of([] { Context context; }).rfind("Context: " + here, 0), 0U);
  EXPECT_EQ(error_of([] { list_isas(); }).rfind("list_isas: " + here, 0), 0U);
  // Not read where the code says what it wants.
  ContextOptions options;
  options.isa = Isa::kReference;
  EXPECT_EQ(Context(options).isa(), Isa::kReference);
}

TEST_F(ContextTest, RefusesAnIsaThatCannotRun) {
  EXPECT_EQ(
      error_of([] { cpu::choose_isa(Isa::kAvx512, avx2_machine()); }, ErrorCode::kUnsupported),
      "Context: isa: got avx512" + kChoices);
  setenv("LADON_ISA", "avx512", 1);
  EXPECT_EQ(error_of([] { cpu::choose_isa({}, avx2_machine()); }, ErrorCode::kUnsupported),
            "Context: LADON_ISA: got avx512" + kChoices);
}

TEST_F(ContextTest, RefusesAnIsaThatDoesNotExist) {
  EXPECT_EQ(
      error_of([] { cpu::choose_isa(static_cast<Isa>(99), avx2_machine()); }),
      "Context: isa: got Isa(99), which is not an instruction set of this library" + kChoices);
  ContextOptions options;
  options.isa = static_cast<Isa>(99);
  EXPECT_EQ(error_of([&] { const Context refused(options); }).rfind("Context: isa: got Isa(99)", 0),
            0U);
}

// ---- control groups
// ------------------------------------------------------------------------------

using Files = std::map<std::string, std::string>;

std::optional<int> limit_of(const Files& files) {
  return cgroup_cpu_limit([&](const std::string& path) -> std::optional<std::string> {
    const auto file = files.find(path);
    if (file == files.end()) return {};
    return file->second;
  });
}

const char* const kMountsV2 =
    "22 1 0:21 / /proc rw,nosuid shared:12 - proc proc rw\n"
    "29 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw,nsdelegate\n";

Files files_v2(const std::string& text) {
  return {{"/proc/self/cgroup", "0::/\n"},
          {"/proc/self/mountinfo", kMountsV2},
          {"/sys/fs/cgroup/cpu.max", text}};
}

TEST(CgroupLimit, ReadsCpuMax) {
  EXPECT_EQ(limit_of(files_v2("200000 100000\n")), 2);
  EXPECT_EQ(limit_of(files_v2("150000 100000\n")), 2);  // rounded up
  EXPECT_EQ(limit_of(files_v2("100001 100000\n")), 2);
  EXPECT_EQ(limit_of(files_v2("1000 100000\n")), 1);
  EXPECT_EQ(limit_of(files_v2("300000 50000")), 6);
  EXPECT_EQ(limit_of(files_v2("max 100000\n")), std::nullopt);
  EXPECT_EQ(limit_of(files_v2("9223372036854775807 1\n")), 2147483647);
}

TEST(CgroupLimit, IgnoresNonsense) {
  for (const char* text : {"", "\n", "100000", "100000 ", "0 100000", "-1 100000", "100000 0",
                           "2x 100000", "99999999999999999999 100000", "1 2 3"}) {
    EXPECT_EQ(limit_of(files_v2(text)), std::nullopt) << text;
  }
  EXPECT_EQ(limit_of({}), std::nullopt);
  Files files = files_v2("200000 100000\n");
  for (const char* groups : {"", "\n\n", "nonsense", "0:", "::", "1:cpu", "0::no/slash"}) {
    files["/proc/self/cgroup"] = groups;
    EXPECT_EQ(limit_of(files), std::nullopt) << groups;
  }
  files["/proc/self/cgroup"] = "0::/\n";
  for (const char* mounts : {"", "x", " - cgroup", "1 2 3 - cgroup\n - \n"}) {
    files["/proc/self/mountinfo"] = mounts;
    EXPECT_EQ(limit_of(files), std::nullopt) << mounts;
  }
}

TEST(CgroupLimit, TheLowestOnTheWayUpCounts) {
  Files files{{"/proc/self/cgroup", "0::/user.slice/job.scope/inner\n"},
              {"/proc/self/mountinfo", kMountsV2},
              {"/sys/fs/cgroup/user.slice/job.scope/inner/cpu.max", "max 100000\n"},
              {"/sys/fs/cgroup/user.slice/job.scope/cpu.max", "400000 100000\n"},
              {"/sys/fs/cgroup/user.slice/cpu.max", "800000 100000\n"}};
  EXPECT_EQ(limit_of(files), 4);
  files["/sys/fs/cgroup/user.slice/cpu.max"] = "250000 100000\n";
  EXPECT_EQ(limit_of(files), 3);
  files["/sys/fs/cgroup/cpu.max"] = "100000 100000\n";
  EXPECT_EQ(limit_of(files), 1);
}

TEST(CgroupLimit, AContainerSeesItsGroupAtTheMount) {
  // No cgroup namespace: the path is the host's, but the mount shows only the part below.
  const std::string mounts =
      "33 22 0:26 /docker/abc /sys/fs/my\\040cgroup ro - cgroup2 cgroup rw\n";
  Files files{{"/proc/self/cgroup", "0::/docker/abc/worker\n"},
              {"/proc/self/mountinfo", mounts},
              {"/sys/fs/my cgroup/worker/cpu.max", "300000 100000\n"}};
  EXPECT_EQ(limit_of(files), 3);
  files["/sys/fs/my cgroup/cpu.max"] = "200000 100000\n";
  EXPECT_EQ(limit_of(files), 2);
  // A group that is not below the mount: "/docker/abcd" is another container.
  for (const char* group : {"0::/docker/abcd\n", "0::/../other\n", "0::/\n"}) {
    files["/proc/self/cgroup"] = group;
    EXPECT_EQ(limit_of(files), 2) << group;
  }
}

TEST(CgroupLimit, ReadsVersionOne) {
  Files files{
      {"/proc/self/cgroup", "12:memory:/docker/abc\n4:cpuset:/\n3:cpu,cpuacct:/docker/abc\n0::/\n"},
      {"/proc/self/mountinfo",
       "31 22 0:27 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
       "32 22 0:28 /docker /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_quota_us", "350000\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_period_us", "100000\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"},
      {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"}};
  EXPECT_EQ(limit_of(files), 4);
  files["/sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_quota_us"] = "-1\n";
  EXPECT_EQ(limit_of(files), std::nullopt);
  files.erase("/sys/fs/cgroup/cpu,cpuacct/abc/cpu.cfs_period_us");
  files["/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "50000\n";
  EXPECT_EQ(limit_of(files), 1);
}

}  // namespace
}  // namespace ladon
