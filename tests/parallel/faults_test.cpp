// Ranks that disagree, throw, or stop: every other rank gets an Error within the deadline, and
// nothing hangs.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <string>
#include <thread>

#include "ladon/communicator.h"
#include "ladon/tensor.h"
#include "parallel/collective_call.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

using std::chrono::milliseconds;

TEST(CommunicatorFaults, AMismatchIsFoundBeforeDataMoves) {
  expect_all_return(run_ranks(3, [](Communicator& communicator) {
    const bool odd = communicator.rank() == 2;
    const Tensor part(odd ? DType::kF16 : DType::kF32, {2});
    Tensor all(part.dtype(), {3, 2});
    const std::string where = "all_gather: call 1 of rank " + std::to_string(communicator.rank());
    EXPECT_EQ(error_of([&] { all_gather(host_context(), communicator, part, all); },
                       ErrorCode::kCommunication),
              where + ": ranks disagree: part: f32 [2] on rank 0, f16 [2] on rank 2");
    EXPECT_EQ(communicator.statistics().bytes_sent, 0);
    barrier(communicator);  // and goes on
  }));
}

TEST(CommunicatorFaults, AnotherOrderOfCalls) {
  expect_all_return(run_ranks(2, [](Communicator& communicator) {
    const Tensor part(DType::kF32, {2});
    Tensor all(DType::kF32, {2, 2});
    const std::string message = error_of(
        [&] {
          if (communicator.rank() == 0) {
            barrier(communicator);
          } else {
            all_gather(host_context(), communicator, part, all);
          }
        },
        ErrorCode::kCommunication);
    EXPECT_NE(message.find("ranks disagree: call 1: barrier on rank 0, all_gather on rank 1"),
              std::string::npos)
        << message;
  }));
}

TEST(CommunicatorFaults, ARankThatStopsIsNamedAfterTheDeadline) {
  const RankErrors errors = run_ranks(
      3,
      [](Communicator& communicator) {
        if (communicator.rank() == 1) {
          std::this_thread::sleep_for(milliseconds(1500));  // the others do not wait for it
          const std::string late =
              error_of([&] { barrier(communicator); }, ErrorCode::kCommunication);
          EXPECT_NE(late.find("failed"), std::string::npos) << late;
          return;
        }
        const std::string message =
            error_of([&] { barrier(communicator); }, ErrorCode::kCommunication);
        // Whichever of the two notices first tells the other; on a busy machine it may find both
        // of the others late.
        bool is_named = false;
        for (const char* silent : {"rank 1", "ranks 1, 2", "ranks 0, 1"}) {
          const std::string text = silent + std::string(" sent or took nothing within 0.5 s");
          is_named = is_named || message.find(text) != std::string::npos;
        }
        EXPECT_TRUE(is_named) << message;
        EXPECT_NE(message.find("barrier: call 1 of rank"), std::string::npos) << message;
        EXPECT_FALSE(communicator.broken().empty());
        EXPECT_NE(error_of([&] { barrier(communicator); }, ErrorCode::kCommunication)
                      .find("barrier: communicator: broken by an earlier failure: "),
                  std::string::npos);
      },
      milliseconds(500));
  expect_all_return(errors);
}

TEST(CommunicatorFaults, ARankThatThrowsInTheMiddleEndsTheCallOnAll) {
  std::atomic<int> published = 0;
  const RankErrors errors = run_ranks(4, [&](Communicator& communicator) {
    run_collective(
        communicator, "work", [](CallSignature&) {},
        [&](CollectiveCall& call) {
          if (call.rank() == 3) throw Error(ErrorCode::kOutOfMemory, "work: no memory");
        },
        [&] { ++published; });
  });
  EXPECT_EQ(published, 0);
  if (runs_here(4, 3)) {
    EXPECT_EQ(errors[3], "work: no memory");
  }
  for (std::size_t r = 0; r < 3; ++r) {
    if (!runs_here(4, static_cast<int>(r))) continue;
    EXPECT_NE(errors[r].find("work: call 1 of rank " + std::to_string(r)), std::string::npos);
    EXPECT_NE(errors[r].find("failed: "), std::string::npos) << errors[r];
    EXPECT_NE(errors[r].find("work: no memory"), std::string::npos) << errors[r];
  }
}

TEST(CommunicatorFaults, MessagesOfAnotherSizeAreNotTaken) {
  const RankErrors errors = run_ranks(2, [](Communicator& communicator) {
    run_collective(
        communicator, "work", [](CallSignature&) {},
        [&](CollectiveCall& call) {
          std::byte bytes[8] = {};
          const std::span<std::byte> all(bytes);
          const int other = 1 - call.rank();
          const std::size_t length = call.rank() == 0 ? 4 : 8;
          const Send send{other, all.first(length)};
          const Receive receive{other, all.first(length)};
          call.exchange(std::span(&send, 1), std::span(&receive, 1));
        },
        [] { ADD_FAILURE() << "published"; });
  });
  for (int r = 0; r < 2; ++r) {
    if (runs_here(2, r)) {
      EXPECT_FALSE(errors[static_cast<std::size_t>(r)].empty());
    }
  }
}

TEST(CommunicatorFaults, OneCallAtATimeOnEachEnd) {
  const auto ends = make_thread_communicators(2);
  std::promise<void> inside;
  std::promise<void> go_on;
  std::thread first([&] {
    run_collective(
        *ends[0], "barrier",
        [&](CallSignature&) {
          inside.set_value();
          go_on.get_future().wait();
        },
        [](CollectiveCall&) {}, [] {});
  });
  inside.get_future().wait();
  EXPECT_EQ(error_of([&] { barrier(*ends[0]); }),
            "barrier: communicator: got a call while another runs, expected one at a time");
  go_on.set_value();
  barrier(*ends[1]);
  first.join();
}

}  // namespace
}  // namespace ladon::test
