// An emulated network: what its clocks show, and how many messages of each scheme have to follow
// each other. All times are those of the emulation.
#include "parallel/emulated_network.h"

#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "ladon/context_parallel.h"
#include "parallel/collective_call.h"
#include "parallel/host_messages.h"
#include "parallel/message_layout.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// Calls work() on every rank; its result for each.
std::vector<double> run_emulated(int ranks, const EmulatedLink& link,
                                 const std::function<double(Communicator&)>& work) {
  const auto ends = make_emulated_communicators(ranks, link);
  std::vector<double> results(ends.size());
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    threads.emplace_back([&, rank] { results[rank] = work(*ends[rank]); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// What ranks compute in these tests takes less.
constexpr double kComputation = 0.5;

void expect_all_near(const std::vector<double>& results, double expected) {
  for (const double result : results) EXPECT_NEAR(result, expected, kComputation);
}

TEST(EmulatedNetwork, AMessageTakesLatencyAndBytesOverBandwidth) {
  const EmulatedLink link{.latency = 10, .bandwidth = 1e6};
  const auto gather = [&](Communicator& communicator) {
    const Tensor part(DType::kU8, {3'000'000});
    Tensor all(DType::kU8, {communicator.size(), part.size(0)});
    const double began = communicator.seconds();
    all_gather(host_context(), communicator, part, all);
    EXPECT_NEAR(communicator.statistics().seconds_waited, (communicator.size() - 1) * (10 + 3.0),
                kComputation);
    return communicator.seconds() - began;
  };
  // Data between two rounds of agreement, one message after the other.
  expect_all_near(run_emulated(2, link, gather), 10 + 13 + 10);
  expect_all_near(run_emulated(4, link, gather), 3 * (10 + 13 + 10));
  expect_all_near(run_emulated(1, link, gather), 0);
}

TEST(EmulatedNetwork, ComputationHidesAMessage) {
  const EmulatedLink link{.latency = 0.02, .bandwidth = 1e9};
  run_emulated(2, link, [](Communicator& communicator) {
    run_collective(
        communicator, "test", [](CallSignature&) {},
        [&](CollectiveCall& call) {
          const std::vector<std::byte> sent(100);
          std::vector<std::byte> received(100);
          const auto exchange = [&](double computes) {
            const double began = communicator.seconds();
            const double waited = link_seconds_waited(communicator);
            begin_exchange(
                call, [&](int) { return std::span<const std::byte>(sent); },
                [&](int) { return std::span<std::byte>(received); });
            while (communicator.seconds() < began + computes) {
            }
            call.wait();
            return link_seconds_waited(communicator) - waited;
          };
          exchange(0);  // from here on both ranks have the same time
          EXPECT_NEAR(exchange(0), 0.02, 0.01);
          EXPECT_NEAR(exchange(0.015), 0.005, 0.004);
          EXPECT_LT(exchange(0.06), 1e-4);
        },
        [] {});
    return 0.0;
  });
}

TEST(EmulatedNetwork, ASplitHasTheSameClockAndPort) {
  run_emulated(4, {.latency = 10, .bandwidth = 1e9}, [](Communicator& communicator) {
    const auto pair = communicator.split(communicator.rank() / 2, 0);
    const double began = communicator.seconds();
    EXPECT_NEAR(pair->seconds(), began, kComputation);
    barrier(*pair);
    EXPECT_NEAR(communicator.seconds() - began, 20, kComputation);
    return 0.0;
  });
}

/// What a scheme waits for data, forward or backward, of 6 heads and 6 KV heads in 3 stages.
std::vector<double> waits_of(ContextScheme scheme, int ranks, bool backward) {
  return run_emulated(ranks, {.latency = 100, .bandwidth = 1e12}, [&](Communicator& communicator) {
    const Context context(ContextOptions{.num_threads = 1});
    ContextPlan plan = plan_context(ranks, 24, 24, {.causal = true});
    plan.scheme = scheme;
    plan.kv_heads_at_once = scheme == ContextScheme::kUlysses ? 1 : 2;
    const Dims shape{1, total_length(plan.queries[static_cast<std::size_t>(communicator.rank())]),
                     6, 8};
    const Tensor x(DType::kF32, shape);
    Tensor out(DType::kF32, shape);
    Tensor lse(DType::kF32, {1, 6, shape[1]});
    Tensor dq(DType::kF32, shape), dk(DType::kF32, shape), dv(DType::kF32, shape);
    context_parallel_attention(context, communicator, x, x, x, {.causal = true}, plan, out, lse);
    if (!backward) return communicator.statistics().seconds_waited;
    communicator.reset_statistics();
    context_parallel_attention_backward(context, communicator, x, x, x, {.causal = true}, plan,
                                        {.out = out, .lse = lse, .dout = x},
                                        {.dq = dq, .dk = dk, .dv = dv});
    return communicator.statistics().seconds_waited;
  });
}

// Where nothing is computed, a rank waits for every step: the messages of a step go together, and
// the results of a stage go with the inputs of the next but one. The ring's sums come one step
// after their keys.
TEST(EmulatedNetwork, StepsOfContextParallelAttention) {
  expect_all_near(waits_of(ContextScheme::kRing, 3, false), 2 * 100);
  expect_all_near(waits_of(ContextScheme::kRing, 3, true), (3 + 1) * 100);
  expect_all_near(waits_of(ContextScheme::kAllGather, 3, false), 3 * 200);
  expect_all_near(waits_of(ContextScheme::kAllGather, 3, true), (3 + 2) * 200);
  expect_all_near(waits_of(ContextScheme::kUlysses, 2, false), (3 + 2) * 100);
  expect_all_near(waits_of(ContextScheme::kUlysses, 2, true), (3 + 2) * 100);
}

TEST(EmulatedNetwork, BadLinks) {
  EXPECT_EQ(error_of([] { make_emulated_communicators(2, {.latency = -1, .bandwidth = 1}); }),
            "make_emulated_communicators: latency: got -1 s, expected 0 or more");
  EXPECT_EQ(error_of([] { make_emulated_communicators(2, {.latency = 1}); }),
            "make_emulated_communicators: bandwidth: got 0 bytes/s, expected more than 0");
}

}  // namespace
}  // namespace ladon::test
