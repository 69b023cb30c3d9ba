// plan_context(): who owns what, how even the work is, and what a call refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ladon/context_parallel.h"
#include "ladon/tensor.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/host_context.h"
#include "support/runnable_isas.h"

namespace ladon::test {
namespace {

using Ranges = std::vector<std::vector<TokenRange>>;

/// The most work of a rank over the mean, where query i of `length` sees keys [i - left, i].
double imbalance(const Ranges& queries, std::int64_t left) {
  double most = 0;
  double total = 0;
  for (const std::vector<TokenRange>& of_rank : queries) {
    double work = 0;
    for (const TokenRange& range : of_rank) {
      for (std::int64_t i = range.begin; i < range.end; ++i) {
        work += static_cast<double>(std::min(i, left) + 1);
      }
    }
    most = std::max(most, work);
    total += work;
  }
  return most * static_cast<double>(queries.size()) / total;
}

TEST(ContextPlanTest, CausalWorkIsEven) {
  for (const int ranks : {1, 2, 3, 4, 7, 64}) {
    const ContextPlan plan = plan_context(ranks, 4096, 4096, {.causal = true});
    EXPECT_LT(imbalance(plan.queries, 4096), 1.05) << ranks;
    EXPECT_EQ(plan.keys, plan.queries);
    const ContextPlan windowed =
        plan_context(ranks, 4096, 4096, {.causal = true, .window_left = 99});
    EXPECT_LT(imbalance(windowed.queries, 99), 1.05) << ranks;
  }
}

TEST(ContextPlanTest, EveryRankOwnsAnEarlyAndALatePart) {
  // One causal sequence: as many tokens for each rank are as much work.
  EXPECT_EQ(plan_context(2, 8000, 8000, {.causal = true}).queries,
            (Ranges{{{0, 2000}, {6000, 8000}}, {{2000, 6000}}}));
  EXPECT_EQ(plan_context(2, 8, 8).queries, (Ranges{{{0, 2}, {6, 8}}, {{2, 6}}}));
  EXPECT_EQ(plan_context(2, 8, 10).keys, (Ranges{{{0, 5}}, {{5, 10}}}));
  EXPECT_EQ(plan_context(1, 5, 5).queries, (Ranges{{{0, 5}}}));
  // Two packed sequences of 4 and 12 tokens: work, not tokens, is cut evenly.
  const std::int64_t offsets[] = {0, 4, 16};
  const ContextPlan packed =
      plan_context(2, 16, 16, {.causal = true, .query_offsets = offsets, .kv_offsets = offsets});
  std::int64_t tokens = 0;
  for (const TokenRange& range : packed.queries[0]) tokens += range.length();
  EXPECT_GE(tokens, 8);
}

TEST(ContextPlanTest, BadLengthsAreRefused) {
  EXPECT_EQ(error_of([] { plan_context(0, 1, 1); }),
            "plan_context: ranks: got 0, expected 1 or more");
  EXPECT_EQ(error_of([] { plan_context(1, -1, 1); }),
            "plan_context: query_len: got -1, expected 0 or more");
  const std::int64_t offsets[] = {0, 4, 3};
  EXPECT_EQ(
      error_of([&] { plan_context(1, 3, 3, {.query_offsets = offsets, .kv_offsets = offsets}); }),
      "plan_context: query_offsets: got offsets that do not rise from 0 to the 3 tokens");
}

/// A call of two ranks over 8 tokens; `change` may spoil it on one of them.
struct Call {
  explicit Call(int rank) : own(rank) {}

  int own;
  ContextPlan plan = plan_context(2, 8, 8);
  AttentionOptions options{};
  Tensor q{DType::kF32, {1, 4, 4, 8}};
  Tensor k{DType::kF32, {1, 4, 2, 8}};
  Tensor out{DType::kF32, {1, 4, 4, 8}};
};

/// What rank 1 and rank 0 say.
template <class Change>
std::vector<std::string> refusals(const Change& change) {
  return run_ranks(2, [&](Communicator& communicator) {
    Call call(communicator.rank());
    change(call);
    context_parallel_attention(host_context(), communicator, call.q, call.k, call.k, call.options,
                               call.plan, call.out);
  });
}

void expect_refusal(const std::string& expected, const std::vector<std::string>& messages) {
  for (int rank = 0; rank < 2; ++rank) {
    if (!runs_here(2, rank)) continue;
    const std::string& message = messages[static_cast<std::size_t>(rank)];
    EXPECT_NE(message.find(expected), std::string::npos) << rank << ": " << message;
  }
}

TEST(ContextParallelErrors, RanksThatDisagree) {
  expect_refusal("ranks disagree: causal: 0 on rank 0, 1 on rank 1",
                 refusals([](Call& call) { call.options.causal = call.own == 1; }));
  expect_refusal("ranks disagree: dropout.seed: 0 on rank 0, 7 on rank 1", refusals([](Call& call) {
                   call.options.dropout = {.probability = 0.5, .seed = call.own == 1 ? 7ULL : 0ULL};
                 }));
  expect_refusal("ranks disagree: q: f32 [1, 8, 4, 8] on rank 0, f32 [1, 8, 2, 8] on rank 1",
                 refusals([](Call& call) {
                   if (call.own == 0) return;
                   call.q = Tensor(DType::kF32, {1, 4, 2, 8});
                   call.out = Tensor(DType::kF32, {1, 4, 2, 8});
                 }));
  expect_refusal("ranks disagree: plan.queries: ", refusals([](Call& call) {
                   if (call.own == 1) call.plan.queries = {{{0, 4}}, {{4, 8}}};
                 }));
}

/// Each option of the call, other on rank 1 than on rank 0.
TEST(ContextParallelErrors, EveryOptionMustBeTheSame) {
  const Tensor wide(DType::kF32, {1, 1, 8, 8});
  const Tensor mask(DType::kBool, {1, 1, 8, 8});
  const Tensor of_heads(DType::kF32, {4});
  const std::int64_t lengths[] = {7};
  const std::int64_t offsets[] = {0, 8};
  const std::pair<std::string, std::function<void(Call&)>> changes[] = {
      {"scale", [](Call& call) { call.options.scale = 0.5; }},
      {"alignment", [](Call& call) { call.options.alignment = Alignment::kTopLeft; }},
      {"position_offset", [](Call& call) { call.options.position_offset = 1; }},
      {"window_left", [](Call& call) { call.options.window_left = 3; }},
      {"window_right", [](Call& call) { call.options.window_right = 3; }},
      {"mask", [&](Call& call) { call.options.mask = mask; }},
      {"bias", [&](Call& call) { call.options.bias = wide; }},
      {"kv_lengths", [&](Call& call) { call.options.kv_lengths = lengths; }},
      {"query_offsets",
       [&](Call& call) { call.options.query_offsets = call.options.kv_offsets = offsets; }},
      {"softcap", [](Call& call) { call.options.softcap = 4; }},
      {"alibi_slopes", [&](Call& call) { call.options.alibi_slopes = of_heads; }},
      {"sinks", [&](Call& call) { call.options.sinks = of_heads; }},
      {"dropout.probability", [](Call& call) { call.options.dropout.probability = 0.5; }},
      {"dropout.first_sequence", [](Call& call) { call.options.dropout.first_sequence = 1; }},
      {"dropout.first_head", [](Call& call) { call.options.dropout.first_head = 1; }},
      {"dropout.first_query", [](Call& call) { call.options.dropout.first_query = 1; }},
      {"dropout.first_key", [](Call& call) { call.options.dropout.first_key = 1; }},
      {"scheme", [](Call& call) { call.plan.scheme = ContextScheme::kRing; }},
      {"kv_heads_at_once", [](Call& call) { call.plan.kv_heads_at_once = 1; }},
      {"k",
       [](Call& call) {
         call.k = Tensor(DType::kF32, {1, 4, 4, 8});
       }},
      {"q",
       [](Call& call) {
         for (Tensor* tensor : {&call.q, &call.k, &call.out}) {
           *tensor = Tensor(DType::kBF16, tensor->shape());
         }
       }},
  };
  for (const auto& [name, change] : changes) {
    expect_refusal("ranks disagree: " + name + ": ", refusals([&apply = change](Call& call) {
                     if (call.own == 1) apply(call);
                   }));
  }
}

TEST(ContextParallelErrors, AnotherInstructionSet) {
  const std::vector<Isa> isas = runnable_isas();
  if (isas.size() < 2) GTEST_SKIP() << "one instruction set";
  const auto messages = run_ranks(2, [&](Communicator& communicator) {
    const Isa isa = isas[static_cast<std::size_t>(communicator.rank())];
    const Context context(ContextOptions{.num_threads = 1, .isa = isa});
    Call call(communicator.rank());
    context_parallel_attention(context, communicator, call.q, call.k, call.k, call.options,
                               call.plan, call.out);
  });
  expect_refusal(std::string("ranks disagree: isa: ") + name_of(isas[0]) + " on rank 0, " +
                     name_of(isas[1]) + " on rank 1",
                 messages);
}

TEST(ContextParallelErrors, ArgumentsOfOneRank) {
  expect_refusal("q: got [1, 3, 4, 8], expected 4 tokens, as many as the plan gives this rank",
                 refusals([](Call& call) {
                   if (call.own == 1) call.q = Tensor(DType::kF32, {1, 3, 4, 8});
                 }));
  expect_refusal("plan.keys: got token 3 nowhere, expected one owner of each",
                 refusals([](Call& call) {
                   call.plan.keys = {{{0, 3}}, {{4, 8}}};
                 }));
  expect_refusal("plan.queries: got token 3 twice, expected one owner of each",
                 refusals([](Call& call) {
                   call.plan.queries = {{{0, 4}}, {{3, 8}}};
                 }));
  expect_refusal("plan.queries: got ranges for 1 ranks, expected 2", refusals([](Call& call) {
                   call.plan.queries = {{{0, 8}}};
                 }));
  expect_refusal("plan.scheme: got kUlysses for 3 heads and 3 KV heads over 2 ranks",
                 refusals([](Call& call) {
                   call.plan.scheme = ContextScheme::kUlysses;
                   call.q = Tensor(DType::kF32, {1, 4, 3, 8});
                   call.k = Tensor(DType::kF32, {1, 4, 3, 8});
                   call.out = Tensor(DType::kF32, {1, 4, 3, 8});
                 }));
  expect_refusal("window_left: got -1, expected 0 or more",
                 refusals([](Call& call) { call.options.window_left = -1; }));
  expect_refusal("out: got [1, 4, 4, 7], expected [1, 4, 4, 8]", refusals([](Call& call) {
                   if (call.own == 0) call.out = Tensor(DType::kF32, {1, 4, 4, 7});
                 }));
}

TEST(ContextParallelErrors, ARankThatNeverCalls) {
  const auto messages = run_ranks(
      2,
      [](Communicator& communicator) {
        if (communicator.rank() == 1) return;
        const Call call(0);
        Tensor out = call.out.clone();
        context_parallel_attention(host_context(), communicator, call.q, call.k, call.k, {},
                                   call.plan, out);
      },
      std::chrono::milliseconds(100));
  if (!runs_here(2, 0)) return;
  EXPECT_NE(messages[0].find("context_parallel_attention: call 1 of rank 0: rank 1 sent or took "
                             "nothing within 0.1 s"),
            std::string::npos)
      << messages[0];
}

}  // namespace
}  // namespace ladon::test
