// ladon/nccl.h: one rank that sends to itself, on one GPU; collectives over ranks on as many GPUs
// as there are.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "ladon/attention.h"
#include "ladon/context_parallel.h"
#include "ladon/nccl.h"
#include "ladon/random.h"
#include "ladon/tensor.h"

namespace ladon::test {
namespace {

using Bytes = std::vector<std::byte>;

/// The engine's own functions.
class Engine : public NcclCommunicator {
 public:
  using NcclCommunicator::abort;
  using NcclCommunicator::NcclCommunicator;
  using NcclCommunicator::poll;
  using NcclCommunicator::silent_ranks;
  using NcclCommunicator::start;

  void wait() {
    while (!poll()) pause();
  }
};

Bytes pattern(std::size_t size, unsigned seed) {
  Bytes bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>((i * 131 + seed * 17 + i / 251) & 0xff);
  }
  return bytes;
}

/// A program's communicators, one for each of the first GPUs, and their streams.
class Nccl : public testing::Test {
 protected:
  void SetUp() override {
    if (cudaGetDeviceCount(&gpus_) != cudaSuccess || gpus_ == 0) {
      GTEST_SKIP() << "skipped: no CUDA device";
    }
    make(1);
  }
  void TearDown() override { clear(); }

  void make(int ranks) {
    clear();
    comms_.resize(static_cast<std::size_t>(ranks));
    streams_.resize(comms_.size());
    ASSERT_EQ(ncclCommInitAll(comms_.data(), ranks, nullptr), ncclSuccess);
    for (int rank = 0; rank < ranks; ++rank) {
      ASSERT_EQ(cudaSetDevice(rank), cudaSuccess);
      ASSERT_EQ(cudaStreamCreateWithFlags(&streams_[static_cast<std::size_t>(rank)],
                                          cudaStreamNonBlocking),
                cudaSuccess);
    }
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
  }

  void clear() {
    for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
      EXPECT_EQ(cudaStreamDestroy(streams_[rank]), cudaSuccess);
      EXPECT_EQ(ncclCommDestroy(comms_[rank]), ncclSuccess);
    }
    comms_.clear();
  }

  /// Calls work(communicator) on one thread for each rank; their messages where they throw.
  template <class Work>
  std::vector<std::string> run_ranks(std::chrono::milliseconds deadline, const Work& work) {
    std::vector<std::string> errors(comms_.size());
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < comms_.size(); ++rank) {
      threads.emplace_back([&, rank] {
        try {
          NcclCommunicator communicator(comms_[rank], streams_[rank], {.deadline = deadline});
          work(communicator);
        } catch (const std::exception& error) {
          errors[rank] = error.what();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    return errors;
  }

  int gpus_ = 0;
  std::vector<ncclComm_t> comms_;
  std::vector<cudaStream_t> streams_;
};

Tensor normal(const Context& context, const Dims& shape, std::uint64_t seed) {
  Tensor tensor(DType::kF32, shape);
  fill_normal(context, tensor, 0, 1, seed);
  return tensor;
}

bool same_bits(const ConstTensorView& a, const ConstTensorView& b) {
  return a.shape() == b.shape() &&
         std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.num_elements()) * 4) == 0;
}

TEST_F(Nccl, MessagesToItself) {
  Engine engine(comms_[0], streams_[0]);
  EXPECT_EQ(engine.rank(), 0);
  EXPECT_EQ(engine.size(), 1);
  unsigned seed = 0;
  for (const std::size_t size : {1U, 0U, 32U, 33U, 70'000U, 5U, 3'000'001U, 0U, 64U}) {
    const Bytes sent = pattern(size, ++seed);
    Bytes received(size, std::byte{0xee});
    const Send send{0, sent};
    const Receive receive{0, received};
    engine.start(std::span(&send, 1), std::span(&receive, 1));
    engine.wait();
    EXPECT_EQ(received, sent) << size;
  }
}

TEST_F(Nccl, SplitGroupsSendToo) {
  Engine engine(comms_[0], streams_[0]);
  const std::unique_ptr<Communicator> part = engine.split(3, 7);
  EXPECT_EQ(part->rank(), 0);
  EXPECT_EQ(part->size(), 1);
  barrier(*part);
  barrier(engine);
}

// Messages wait for the stream's other work, here as long as the test likes.
TEST_F(Nccl, AbortEndsAStepThatDoesNotEnd) {
  std::atomic<bool> go = false;
  {
    Engine engine(comms_[0], streams_[0]);
    ASSERT_EQ(cudaLaunchHostFunc(
                  streams_[0],
                  [](void* flag) {
                    while (!*static_cast<std::atomic<bool>*>(flag)) std::this_thread::yield();
                  },
                  &go),
              cudaSuccess);
    const Bytes sent = pattern(100, 1);
    Bytes received(100, std::byte{0xee});
    const Send send{0, sent};
    const Receive receive{0, received};
    engine.start(std::span(&send, 1), std::span(&receive, 1));
    for (int i = 0; i < 100; ++i) {
      EXPECT_FALSE(engine.poll());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(engine.silent_ranks(), std::vector<int>{0});
    go = true;  // NCCL waits for kernels that it has enqueued
    engine.abort("the test");
    EXPECT_EQ(received, Bytes(100, std::byte{0xee}));
  }
  EXPECT_EQ(cudaStreamSynchronize(streams_[0]), cudaSuccess);
  Engine next(comms_[0], streams_[0]);  // the program's own communicator is not harmed
  const Bytes sent = pattern(100, 1);
  Bytes received(100);
  const Send send{0, sent};
  const Receive receive{0, received};
  next.start(std::span(&send, 1), std::span(&receive, 1));
  next.wait();
  EXPECT_EQ(received, sent);
}

TEST_F(Nccl, RefusesNoCommunicator) {
  try {
    NcclCommunicator communicator(nullptr, streams_[0]);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCommunication);
    EXPECT_STREQ(error.what(),
                 "NcclCommunicator: comm: got none, expected an initialised ncclComm_t");
  }
}

TEST_F(Nccl, CollectivesAndAttentionAsInOneProcess) {
  const Context one;
  const Tensor q = normal(one, {1, 130, 4, 16}, 1);
  const Tensor k = normal(one, {1, 130, 2, 16}, 2);
  const AttentionOptions options{.causal = true};
  const Tensor whole = attention(one, q, k, k, options);
  for (int ranks = 1; ranks <= gpus_ && ranks <= 4; ++ranks) {
    make(ranks);
    const ContextPlan plan = plan_context(ranks, 130, 130, options);
    const auto errors = run_ranks(std::chrono::seconds(60), [&](Communicator& communicator) {
      const Context context(ContextOptions{.num_threads = 1});
      const int rank = communicator.rank();
      Tensor part(DType::kF32, {3});
      std::fill_n(part.data_as<float>(), 3, static_cast<float>(rank + 1));
      Tensor all(DType::kF32, {ranks, 3});
      all_gather(context, communicator, part, all);
      Tensor sum(DType::kF32, {3});
      all_reduce(context, communicator, part, sum);
      for (int other = 0; other < ranks; ++other) {
        EXPECT_EQ(all.view().select(0, other).data_as<float>()[2], static_cast<float>(other + 1));
      }
      EXPECT_EQ(sum.data_as<float>()[1], static_cast<float>(ranks * (ranks + 1)) / 2);
      const auto take = [&](const Tensor& from, const std::vector<TokenRange>& ranges) {
        std::int64_t length = 0;
        for (const TokenRange& range : ranges) length += range.length();
        Tensor own(DType::kF32, {1, length, from.size(2), 16});
        std::int64_t first = 0;
        for (const TokenRange& range : ranges) {
          copy(context, from.view().slice(1, range.begin, range.end),
               own.view().slice(1, first, first + range.length()));
          first += range.length();
        }
        return own;
      };
      const auto index = static_cast<std::size_t>(rank);
      const Tensor own_q = take(q, plan.queries[index]);
      const Tensor own_k = take(k, plan.keys[index]);
      Tensor out(DType::kF32, own_q.shape());
      context_parallel_attention(context, communicator, own_q, own_k, own_k, options, plan, out);
      EXPECT_TRUE(same_bits(out, take(whole, plan.queries[index]))) << rank;
    });
    EXPECT_EQ(errors, std::vector<std::string>(errors.size()));
  }
  if (gpus_ == 1) std::puts("one GPU: ranks that send to each other were not tried");
}

TEST_F(Nccl, SilentRanksEndAtTheDeadline) {
  if (gpus_ < 2) GTEST_SKIP() << "skipped: fewer than two CUDA devices";
  make(2);
  const auto errors = run_ranks(std::chrono::milliseconds(500), [](Communicator& communicator) {
    barrier(communicator);
    if (communicator.rank() == 1) return;
    try {
      barrier(communicator);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kCommunication);
      EXPECT_FALSE(communicator.broken().empty());
      throw;
    }
  });
  EXPECT_NE(errors[0].find("rank 1 sent or took nothing within 0.5 s"), std::string::npos)
      << errors[0];
}

}  // namespace
}  // namespace ladon::test
