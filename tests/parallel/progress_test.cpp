// Engines that move bytes only while they are polled: a rank polls them while it computes.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "ladon/context_parallel.h"
#include "ladon/tensor.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

/// One rank. A step ends at its second poll: without a pause where the rank has polled while it
/// computed.
class PolledCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;

  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }

  int steps_without_pause = 0;
  std::chrono::milliseconds first_poll_takes{0};
  int fails_in_step = -1;  // its first poll reports the failure of another rank

 protected:
  void start(std::span<const Send> /*sends*/, std::span<const Receive> /*receives*/) override {
    ++steps_;
    polls_ = 0;
    paused_ = false;
  }
  bool poll() override {
    if (steps_ == fails_in_step) {
      throw Error(ErrorCode::kCommunication, "rank 1 failed: no memory");
    }
    if (++polls_ < 2) {
      std::this_thread::sleep_for(first_poll_takes);
      return false;
    }
    if (!paused_) ++steps_without_pause;
    return true;
  }
  void pause() override { paused_ = true; }
  std::vector<int> silent_ranks() const override { return {}; }
  void abort(std::string_view /*reason*/) noexcept override {}
  std::unique_ptr<Communicator> make_group(std::span<const int> /*group*/, int /*color*/,
                                           int /*key*/) override {
    return nullptr;
  }

 private:
  int steps_ = 0;
  int polls_ = 0;
  bool paused_ = false;
};

/// Forward over four heads, in as many stages.
struct Work {
  static constexpr std::int64_t kTokens = 2048;  // more than a task has

  void forward(Communicator& communicator, ContextScheme scheme) {
    ContextPlan plan = plan_context(1, kTokens, kTokens);
    plan.scheme = scheme;
    plan.kv_heads_at_once = 1;
    context_parallel_attention(context, communicator, x, x, x, {}, plan, out);
  }
  void backward(Communicator& communicator, ContextScheme scheme) {
    ContextPlan plan = plan_context(1, kTokens, kTokens);
    plan.scheme = scheme;
    plan.kv_heads_at_once = 1;
    context_parallel_attention_backward(context, communicator, x, x, x, {}, plan,
                                        {.out = out, .lse = lse, .dout = x}, {.dq = dq, .dk = dk});
  }

  const Context context{ContextOptions{.num_threads = 1}};
  const Tensor x{DType::kF32, {1, kTokens, 4, 8}};
  Tensor out{DType::kF32, x.shape()};
  Tensor dq{DType::kF32, x.shape()};
  Tensor dk{DType::kF32, x.shape()};
  Tensor lse{DType::kF32, {1, 4, kTokens}};
};

TEST(Progress, RanksPollWhileTheyCompute) {
  Work work;
  for (const ContextScheme scheme : {ContextScheme::kAllGather, ContextScheme::kUlysses}) {
    PolledCommunicator communicator;
    work.forward(communicator, scheme);
    // While the last head is computed, kAllGather has nothing in flight.
    EXPECT_GE(communicator.steps_without_pause, scheme == ContextScheme::kUlysses ? 4 : 3);
    communicator.steps_without_pause = 0;
    work.backward(communicator, scheme);
    EXPECT_GE(communicator.steps_without_pause, 4);
  }
}

/// In the step of the first head: agreement and the first inputs have come before.
TEST(Progress, AFailureEndsTheComputation) {
  Work work;
  PolledCommunicator communicator;
  communicator.fails_in_step = 3;
  const std::string message = error_of([&] { work.forward(communicator, ContextScheme::kUlysses); },
                                       ErrorCode::kCommunication);
  EXPECT_NE(message.find("rank 1 failed: no memory"), std::string::npos) << message;
  EXPECT_FALSE(communicator.broken().empty());
}

/// A rank that was held up itself finds what has come meanwhile.
TEST(Progress, ARankLooksOnceMoreAfterTheDeadline) {
  PolledCommunicator communicator(CommunicatorOptions{.deadline = std::chrono::milliseconds(1)});
  communicator.first_poll_takes = std::chrono::milliseconds(20);
  barrier(communicator);
  EXPECT_EQ(communicator.broken(), "");
}

}  // namespace
}  // namespace ladon::test
