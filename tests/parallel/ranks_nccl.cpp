// The tests of ranks over ladon/nccl.h, with threads for GPUs. cuda/nccl_test.cpp runs on real
// ones.
#include "parallel/pretended_nccl.h"

#include <exception>
#include <thread>

#include "ladon/nccl.h"
#include "parallel/ranks.h"

namespace ladon::test {

std::vector<int> rank_counts() { return {1, 2, 3}; }

bool runs_here(int /*count*/, int /*rank*/) { return true; }

RankErrors run_ranks(int count, const std::function<void(Communicator&)>& work,
                     std::chrono::milliseconds deadline) {
  const auto group = std::make_shared<NcclGroup>(count);
  RankErrors errors(static_cast<std::size_t>(count));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < count; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        CUstream_st stream;
        ncclComm program{.group = group, .rank = rank};
        NcclCommunicator communicator(&program, &stream, {.deadline = deadline});
        work(communicator);
      } catch (const std::exception& error) {
        errors[static_cast<std::size_t>(rank)] = error.what();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return errors;
}

// A rank that has failed cannot tell the others: each ends at its own deadline.
TEST(PretendedNccl, ARankThatFailsIsFoundByTheDeadline) {
  const RankErrors errors = run_ranks(
      3,
      [](Communicator& communicator) {
        barrier(communicator);
        if (communicator.rank() == 1) throw Error(ErrorCode::kOutOfMemory, "gone");
        try {
          barrier(communicator);
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::kCommunication);
          EXPECT_FALSE(communicator.broken().empty());
          throw;
        }
      },
      std::chrono::milliseconds(500));
  EXPECT_EQ(errors[1], "gone");
  for (const std::size_t rank : {0U, 2U}) {
    EXPECT_NE(errors[rank].find("sent or took nothing within 0.5 s"), std::string::npos);
  }
}

}  // namespace ladon::test
