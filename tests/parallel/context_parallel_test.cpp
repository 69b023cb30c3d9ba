// Context-parallel attention against one process: the same bits forward and for dq, sums of dk, dv,
// dbias and dsinks within the bounds, bytes by formula.
#include "ladon/context_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "parallel/context_volume.h"
#include "parallel/message_layout.h"
#include "parallel/ranks.h"
#include "support/host_context.h"
#include "support/isas.h"
#include "support/run_case.h"
#include "support/truth.h"

namespace ladon::test {
namespace {

/// Every option of attention().
std::vector<Case> option_cases() {
  const Case plain{.batch = 2, .query_len = 75, .kv_len = 75, .head_dim = 12, .value_dim = 10};
  std::vector<Case> cases;
  const auto add = [&](auto change) {
    Case problem = plain;
    problem.seed = cases.size() + 1;
    change(problem);
    cases.push_back(problem);
  };
  add([](Case&) {});
  add([](Case& c) { c.causal = true; });
  add([](Case& c) {
    c.causal = true;
    c.window_left = 20;
    c.sinks = true;
    c.dtype = c.kv_dtype = DType::kBF16;
  });
  add([](Case& c) {
    c.causal = true;
    c.alignment = Alignment::kTopLeft;
    c.kv_len = 40;
    c.alibi = true;
    c.softcap = 5;
  });
  add([](Case& c) {
    c.kv_len = 130;
    c.window_left = 30;
    c.window_right = 9;
    c.dropout = 0.3;
    c.lengths = Lengths::kPadded;
    c.dlse = true;
  });
  add([](Case& c) {
    c.bias = {.present = true, .full = {true, true, true, true}};
    c.mask = {.present = true, .full = {false, true, false, true}};
    c.dtype = c.kv_dtype = DType::kBF16;
    c.causal = true;
  });
  add([](Case& c) {
    c.batch = 3;
    c.lengths = Lengths::kPacked;
    c.causal = true;
    c.dropout = 0.2;
    c.bias = {.present = true, .full = {true, false, true, false}};
    c.sinks = true;
  });
  add([](Case& c) {  // fewer rows than a tile, keys past one split
    c.batch = 1;
    c.query_len = 5;
    c.kv_len = 1100;
    c.causal = true;
    c.sinks = true;
  });
  add([](Case& c) {
    c.dtype = DType::kF32;
    c.kv_dtype = DType::kF16;
    c.causal = true;
    c.position_offset = 3;
    c.first_query = 8;
    c.dropout = 0.5;
  });
  add([](Case& c) {
    c.dtype = c.kv_dtype = DType::kF64;
    c.causal = true;
    c.query_len = c.kv_len = 3;  // fewer tokens than ranks
  });
  return cases;
}

/// One rank's part of a whole problem, and the calls over it.
class RankPart {
 public:
  RankPart(const Context& context, Communicator& communicator, const CaseData& data,
           const ContextPlan& plan)
      : context_(context), communicator_(communicator), data_(data), plan_(plan) {
    q_ = part(data.q(), queries(), 1);
    k_ = part(data.k(), keys(), 1);
    v_ = part(data.v(), keys(), 1);
    dout_ = part(data.dout(), queries(), 1);
    if (!data.dlse().absent()) dlse_ = part(data.dlse(), queries(), 2);
    Dims out_shape = data.out_shape();
    out_shape[1] = q_.size(1);
    Dims lse_shape = data.lse_shape();
    lse_shape[2] = q_.size(1);
    out = Tensor(data.problem().dtype, out_shape);
    lse = Tensor(data.lse_dtype(), lse_shape);
    dq = Tensor(data.problem().dtype, q_.shape());
    dk = Tensor(data.problem().kv_dtype, k_.shape());
    dv = Tensor(data.problem().kv_dtype, v_.shape());
  }

  std::span<const TokenRange> queries() const { return own(plan_.queries); }
  std::span<const TokenRange> keys() const { return own(plan_.keys); }
  static Tensor part(const ConstTensorView& whole, std::span<const TokenRange> ranges, int dim) {
    Dims shape = whole.shape();
    shape[dim] = total_length(ranges);
    Tensor own(whole.dtype(), shape);
    take_tokens(host_context(), whole, ranges, dim, own);
    return own;
  }

  void forward() {
    context_parallel_attention(context_, communicator_, q_, k_, v_, data_.options(), plan_, out,
                               lse);
  }
  void backward() {
    AttentionGradients gradients{.dq = dq, .dk = dk, .dv = dv};
    const Case& problem = data_.problem();
    if (problem.bias.present) {
      dbias = Tensor(problem.bias_dtype, data_.bias().shape());
      gradients.dbias = dbias;
    }
    if (problem.sinks) {
      dsinks = Tensor(DType::kF64, {problem.num_heads});
      gradients.dsinks = dsinks;
    }
    AttentionSaved saved{.out = out, .lse = lse, .dout = dout_};
    if (dlse_.rank() != 0) saved.dlse = dlse_;
    context_parallel_attention_backward(context_, communicator_, q_, k_, v_, data_.options(), plan_,
                                        saved, gradients);
  }

  /// A gradient of keys of all ranks, in f64.
  Tensor whole_of(const Tensor& own, const Dims& shape) {
    Tensor terms(DType::kF64, shape);
    put_tokens(host_context(), own, keys(), 1, terms);
    Tensor sum(DType::kF64, shape);
    all_reduce(host_context(), communicator_, terms, sum);
    return sum;
  }

  Tensor out, lse, dq, dk, dv, dbias, dsinks;

 private:
  std::span<const TokenRange> own(const std::vector<std::vector<TokenRange>>& ranges) const {
    return ranges[static_cast<std::size_t>(communicator_.rank())];
  }

  const Context& context_;
  Communicator& communicator_;
  const CaseData& data_;
  const ContextPlan& plan_;
  Tensor q_, k_, v_, dout_, dlse_;
};

/// A rank's part of the truth.
Bounded part_of(const Bounded& whole, std::span<const TokenRange> ranges, int dim) {
  return {RankPart::part(whole.value, ranges, dim), RankPart::part(whole.magnitude, ranges, dim),
          RankPart::part(whole.sensitivity, ranges, dim)};
}

struct Run {
  Isa isa = Isa::kReference;
  int ranks = 1;
  Case problem{};
  ContextScheme scheme = ContextScheme::kAllGather;
  bool check_bounds = false;
  std::int64_t kv_heads_at_once = 1 + ranks % 2;

  std::string describe() const {
    const char* const names[] = {"auto", "all-gather", "ring", "Ulysses"};
    return std::string(name_of(isa)) + ", " + std::to_string(ranks) + " ranks, " +
           names[static_cast<int>(scheme)] + ": " + problem.describe();
  }
};

/// The volumes of forward and backward.
std::pair<std::int64_t, std::int64_t> bytes_of(ContextScheme scheme, const Volume& volume,
                                               const ContextPlan& plan, int rank) {
  switch (scheme) {
    case ContextScheme::kRing: return {volume.ring(plan, rank), volume.ring_backward(plan, rank)};
    case ContextScheme::kUlysses: return {volume.ulysses(), volume.ulysses_backward()};
    default: return {volume.gather(plan, rank), volume.gather_backward(plan, rank)};
  }
}

void check_bounds(const Run& run, const CaseData& data, const Truth& truth, RankPart& part) {
  const Case& problem = run.problem;
  const std::string what = run.describe();
  const auto coarser = [&](DType dtype) {
    return epsilon_of(dtype) > epsilon_of(problem.dtype) ? dtype : problem.dtype;
  };
  const Tensor dk = part.whole_of(part.dk, data.k().shape());
  const Tensor dv = part.whole_of(part.dv, data.v().shape());
  EXPECT_LE(worst_ratio(part.out, part_of(truth.out, part.queries(), 1), problem.dtype), 1) << what;
  EXPECT_LE(worst_ratio(part.lse, part_of(truth.lse, part.queries(), 2), data.lse_dtype()), 1)
      << what;
  EXPECT_LE(worst_ratio(part.dq, part_of(truth.dq, part.queries(), 1), problem.dtype), 1) << what;
  EXPECT_LE(worst_ratio(dk, truth.dk, coarser(problem.kv_dtype)), 1) << what;
  EXPECT_LE(worst_ratio(dv, truth.dv, coarser(problem.kv_dtype)), 1) << what;
  if (problem.bias.present) {
    EXPECT_LE(worst_ratio(part.dbias, truth.dbias, coarser(problem.bias_dtype)), 1) << what;
  }
  if (problem.sinks) {
    EXPECT_LE(worst_ratio(part.dsinks, truth.dsinks, problem.dtype), 1) << what;
  }
}

void expect_like_one_process(const Run& run) {
  const CaseData data(run.problem);
  const Context whole_context(ContextOptions{.num_threads = 2, .isa = run.isa});
  const CaseResults expected = test::run(whole_context, data);
  const Truth truth = run.check_bounds ? truth_of(data) : Truth();
  ContextPlan plan = plan_context(run.ranks, data.q().size(1), data.k().size(1), data.options());
  plan.scheme = run.scheme;
  plan.kv_heads_at_once = run.kv_heads_at_once;
  const std::string what = run.describe();
  expect_all_return(run_ranks(run.ranks, [&](Communicator& communicator) {
    const Context context(ContextOptions{.num_threads = 1, .isa = run.isa});
    RankPart part(context, communicator, data, plan);
    const Volume volume{run.ranks, total_length(part.queries()), total_length(part.keys()), data};
    const auto [forward_bytes, backward_bytes] =
        bytes_of(run.scheme, volume, plan, communicator.rank());
    part.forward();
    EXPECT_EQ(communicator.statistics().bytes_sent, forward_bytes) << what;
    communicator.reset_statistics();
    part.backward();
    EXPECT_EQ(communicator.statistics().bytes_sent,
              backward_bytes + volume.side_gradients(communicator.rank()))
        << what;
    if (run.scheme != ContextScheme::kRing) {
      const auto same = [&](const Tensor& own, const ConstTensorView& whole, int dim) {
        return same_bits(own, RankPart::part(whole, part.queries(), dim));
      };
      EXPECT_TRUE(same(part.out, expected.out.view(), 1)) << what;
      EXPECT_TRUE(same(part.lse, expected.lse, 2)) << what;
      EXPECT_TRUE(same(part.dq, expected.dq.view(), 1)) << what;
    }
    RankPart again(context, communicator, data, plan);
    again.forward();
    again.backward();
    EXPECT_TRUE(same_bits(part.out, again.out) && same_bits(part.lse, again.lse)) << what;
    EXPECT_TRUE(same_bits(part.dk, again.dk) && same_bits(part.dv, again.dv)) << what;
    if (run.check_bounds) check_bounds(run, data, truth, part);
  }));
}

class ContextParallel : public testing::TestWithParam<Isa> {};

INSTANTIATE_TEST_SUITE_P(Isas, ContextParallel, testing::ValuesIn(runnable_isas()), isa_test_name);

bool is_fastest(Isa isa) { return isa == runnable_isas().back(); }

TEST_P(ContextParallel, AllGatherIsLikeOneProcess) {
  for (Case problem : option_cases()) {
    problem.num_heads = 6;
    problem.num_kv_heads = 3;
    for (const int ranks : rank_counts()) {
      expect_like_one_process({GetParam(), ranks, problem, ContextScheme::kAllGather,
                               is_fastest(GetParam()) && ranks < 4});
    }
  }
}

TEST_P(ContextParallel, UlyssesIsLikeOneProcess) {
  for (Case problem : option_cases()) {
    for (const int ranks : rank_counts()) {
      const auto third = static_cast<std::int64_t>(problem.seed % 3);
      problem.num_heads = 2 * ranks;
      // As many KV heads as ranks or twice as many, one for two ranks, and one for all.
      problem.num_kv_heads = third > 0 ? third * ranks : ranks == 4 ? 2 : 1;
      expect_like_one_process({GetParam(), ranks, problem, ContextScheme::kUlysses,
                               is_fastest(GetParam()) && ranks < 4});
    }
  }
}

TEST_P(ContextParallel, RingIsWithinTheBounds) {
  for (Case problem : option_cases()) {
    problem.num_heads = 4;
    problem.num_kv_heads = 2;
    for (const int ranks : rank_counts()) {
      expect_like_one_process(
          {GetParam(), ranks, problem, ContextScheme::kRing, is_fastest(GetParam()) || ranks == 3});
    }
  }
}

/// Long enough for several stages; with kUlysses they are some of the query heads of one KV head.
TEST(ContextParallelStages, AreLikeOneProcess) {
  Case problem{.batch = 1, .query_len = 2100, .kv_len = 2100, .head_dim = 64, .value_dim = 64};
  problem.causal = true;
  problem.window_left = 300;
  problem.num_heads = 16;
  problem.num_kv_heads = 4;
  for (const ContextScheme scheme : {ContextScheme::kAllGather, ContextScheme::kUlysses}) {
    for (const int kv_heads_at_once : {0, 3}) {
      expect_like_one_process(
          {runnable_isas().back(), 2, problem, scheme, false, kv_heads_at_once});
    }
  }
}

/// Long enough for kUlysses to take the queries of few heads in parts.
TEST(ContextParallelStages, PartsOfQueriesAreLikeOneProcess) {
  const Case plain{.batch = 1, .query_len = 800, .kv_len = 800, .head_dim = 64, .value_dim = 64};
  const auto check = [&](int ranks, std::int64_t num_kv_heads, auto change) {
    Case problem = plain;
    problem.num_heads = 2 * ranks;
    problem.num_kv_heads = num_kv_heads;
    change(problem);
    expect_like_one_process(
        {runnable_isas().back(), ranks, problem, ContextScheme::kUlysses, true, 0});
  };
  check(2, 4, [](Case& c) { c.causal = true; });
  check(2, 1, [](Case& c) {  // both ranks have the same KV head
    c.causal = true;
    c.window_left = 90;
    c.sinks = true;
    c.dtype = c.kv_dtype = DType::kBF16;
  });
  check(2, 2, [](Case& c) {  // all keys come with the first part
    c.kv_len = 500;
    c.bias = {.present = true, .full = {false, true, true, true}};
    c.mask = {.present = true, .full = {true, false, true, true}};
    c.dropout = 0.3;
    c.dlse = true;
  });
  check(2, 2, [](Case& c) {  // the first queries see no key
    c.causal = true;
    c.kv_len = 300;
    c.alibi = true;
    c.softcap = 5;
    c.value_dim = 48;
  });
  check(3, 3, [](Case& c) {
    c.causal = true;
    c.query_len = c.kv_len = 1500;
  });
}

}  // namespace
}  // namespace ladon::test
