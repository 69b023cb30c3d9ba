// merge_attention(): attention over parts of the keys, merged, is attention over all of them; and
// so is what the library's own split of the keys gives.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

std::vector<double> values_of(const ConstTensorView& view) {
  const Tensor wide = Tensor::copy_of(host_context(), view, DType::kF64);
  return {wide.data_as<double>(), wide.data_as<double>() + wide.num_elements()};
}

void expect_near_all(const std::vector<double>& got, const std::vector<double>& expected,
                     double tolerance, const std::string& what) {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (std::isinf(expected[i])) {
      ASSERT_EQ(got[i], expected[i]) << what << " at " << i;
    } else {
      ASSERT_NEAR(got[i], expected[i], tolerance) << what << " at " << i;
    }
  }
}

/// out and lse of attention().
struct Result {
  Result(DType dtype, const ConstTensorView& q, const ConstTensorView& v)
      : out(dtype, {q.size(0), q.size(1), q.size(2), v.size(3)}),
        lse(dtype == DType::kF64 ? DType::kF64 : DType::kF32, {q.size(0), q.size(2), q.size(1)}) {}

  Tensor out;
  Tensor lse;
};

/// A random problem over `kv_len` keys whose mask also hides all keys from some rows.
struct MergeProblem {
  MergeProblem(DType type, std::int64_t keys, std::uint64_t seed, double score = 1)
      : dtype(type), kv_len(keys) {
    q = Tensor(dtype, {2, 3, 4, 8});
    k = Tensor(dtype, {2, kv_len, 2, 8});
    v = Tensor(dtype, {2, kv_len, 2, 5});
    mask = Tensor(DType::kBool, {2, 1, 3, kv_len});
    bias = Tensor(DType::kF32, {1, 4, 1, kv_len});
    sinks = Tensor(DType::kF32, {4});
    // The mean lifts every score to about `score` (8 products of mean^2, by the default scale).
    const double mean = score == 1 ? 0 : std::sqrt(score / std::sqrt(8.0));
    fill_normal(host_context(), q, mean, score == 1 ? 1 : 0.01, seed, 1);
    fill_normal(host_context(), k, mean, score == 1 ? 1 : 0.01, seed, 2);
    fill_normal(host_context(), v, 0, 1, seed, 3);
    fill_normal(host_context(), bias, 0, 1, seed, 4);
    fill_normal(host_context(), sinks, score == 1 ? 0 : score, 2, seed, 5);
    Random random(seed, 6);
    for (std::int64_t i = 0; i < mask.num_elements(); ++i) {
      const bool row_sees_nothing = i / std::max<std::int64_t>(kv_len, 1) == 4;
      mask.data_as<bool>()[i] = !row_sees_nothing && random.uniform() < 0.7;
    }
  }

  /// attention() over keys [begin, end).
  Result run(const Context& context, std::int64_t begin, std::int64_t end, bool with_sinks) const {
    AttentionOptions options;
    options.mask = ConstTensorView(mask).slice(3, begin, end);
    options.bias = ConstTensorView(bias).slice(3, begin, end);
    if (with_sinks) options.sinks = sinks;
    Result result(dtype, q, v);
    host_attention(context, q, ConstTensorView(k).slice(1, begin, end),
                   ConstTensorView(v).slice(1, begin, end), options, result.out, result.lse);
    return result;
  }

  /// The parts between the cuts, merged.
  Result run_in_parts(const Context& context, const std::vector<std::int64_t>& cuts,
                      bool with_sinks) const {
    std::vector<Result> parts;
    for (std::size_t i = 0; i + 1 < cuts.size(); ++i) {
      parts.push_back(run(context, cuts[i], cuts[i + 1], false));
    }
    Result merged(dtype, q, v);
    merge(context, parts, merged, with_sinks ? ConstTensorView(sinks) : ConstTensorView());
    return merged;
  }

  static void merge(const Context& context, const std::vector<Result>& parts, Result& merged,
                    const ConstTensorView& sinks) {
    std::vector<ConstTensorView> outs;
    std::vector<ConstTensorView> lses;
    for (const Result& part : parts) {
      outs.push_back(part.out);
      lses.push_back(part.lse);
    }
    fill_normal(host_context(), merged.out, 0, 1, 98);  // everything must be overwritten
    fill_normal(host_context(), merged.lse, 0, 1, 99);
    host_merge_attention(context, outs, lses, merged.out, merged.lse, sinks);
  }

  DType dtype;
  std::int64_t kv_len;
  Tensor q, k, v, mask, bias, sinks;
};

/// 0, some cuts in between (equal ones make empty parts), kv_len.
std::vector<std::int64_t> random_cuts(Random& random, std::int64_t kv_len, int parts) {
  std::vector<std::int64_t> cuts{0, kv_len};
  for (int i = 1; i < parts; ++i) cuts.push_back(random.below(kv_len + 1));
  if (parts > 3) cuts[2] = cuts[3];
  std::sort(cuts.begin(), cuts.end());
  return cuts;
}

std::string to_text(const std::vector<std::int64_t>& cuts) {
  return Dims(std::span<const std::int64_t>(cuts)).to_string();
}

class Merge : public ContextTest {
 protected:
  void expect_parts_merge(DType dtype, double tolerance, double score = 1) {
    Random random(static_cast<std::uint64_t>(dtype) + 11);
    for (int trial = 0; trial < 40; ++trial) {
      const std::int64_t kv_len = trial % 8 == 7 ? random.below(900) : random.below(70);
      const MergeProblem problem(dtype, kv_len, static_cast<std::uint64_t>(trial), score);
      const std::vector<std::int64_t> cuts = random_cuts(random, kv_len, 1 + trial % 5);
      for (const bool with_sinks : {false, true}) {
        const std::string what = std::string(name_of(dtype)) + " " + to_text(cuts);
        const Result whole = problem.run(context_, 0, kv_len, with_sinks);
        const Result merged = problem.run_in_parts(context_, cuts, with_sinks);
        expect_near_all(values_of(merged.out), values_of(whole.out), tolerance, what + " out");
        // Of f32 and smaller types, lse is f32 and its rounding grows with it.
        const double lse_tolerance = dtype == DType::kF64 ? tolerance : 4e-6 * std::max(1.0, score);
        expect_near_all(values_of(merged.lse), values_of(whole.lse), lse_tolerance, what + " lse");
        if (HasFatalFailure()) return;
      }
    }
  }
};

LADON_FOR_EACH_CONTEXT(Merge);

// Values are normal: the largest of these problems are about 4.
TEST_P(Merge, PartsOfF64) { expect_parts_merge(DType::kF64, 1e-12); }
TEST_P(Merge, PartsOfF32) { expect_parts_merge(DType::kF32, 4 * 4 * epsilon_of(DType::kF32)); }
TEST_P(Merge, PartsOfF16) { expect_parts_merge(DType::kF16, 4 * 2 * epsilon_of(DType::kF16)); }
TEST_P(Merge, PartsOfBF16) { expect_parts_merge(DType::kBF16, 4 * 2 * epsilon_of(DType::kBF16)); }

TEST_P(Merge, ScoresOfTenThousand) {
  expect_parts_merge(DType::kF64, 1e-10, 1e4);
  // Scores and lse of 1e4 in f32 are good to about 1e-3, and weights as they are.
  expect_parts_merge(DType::kF32, 2e-2, 1e4);
}

TEST_P(Merge, OnePartStaysAsItWas) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    const MergeProblem problem(dtype, 33, 5);
    const Result whole = problem.run(context_, 0, 33, false);
    const Result merged = problem.run_in_parts(context_, {0, 33}, false);
    EXPECT_EQ(values_of(merged.out), values_of(whole.out));
    EXPECT_EQ(values_of(merged.lse), values_of(whole.lse));
  }
}

TEST_P(Merge, MergesOfMerges) {
  const MergeProblem problem(DType::kF64, 40, 6);
  std::vector<Result> left;
  left.push_back(problem.run(context_, 0, 13, false));
  left.push_back(problem.run(context_, 13, 20, false));
  std::vector<Result> both;
  both.emplace_back(DType::kF64, problem.q, problem.v);
  MergeProblem::merge(context_, left, both[0], {});
  both.push_back(problem.run(context_, 20, 40, false));
  Result merged(DType::kF64, problem.q, problem.v);
  MergeProblem::merge(context_, both, merged, problem.sinks);
  const Result whole = problem.run(context_, 0, 40, true);
  expect_near_all(values_of(merged.out), values_of(whole.out), 1e-12, "out");
  expect_near_all(values_of(merged.lse), values_of(whole.lse), 1e-12, "lse");
}

TEST_P(Merge, PartsThatAreAllEmpty) {
  const MergeProblem problem(DType::kF32, 0, 7);
  for (const bool with_sinks : {false, true}) {
    for (const std::vector<std::int64_t>& cuts :
         {std::vector<std::int64_t>{0, 0}, std::vector<std::int64_t>{0, 0, 0, 0}}) {
      const Result merged = problem.run_in_parts(context_, cuts, with_sinks);
      for (const double value : values_of(merged.out)) EXPECT_EQ(value, 0);
      for (const double value : values_of(merged.lse)) EXPECT_EQ(value, -kInfinity);
    }
  }
}

TEST_P(Merge, ALargeSink) {
  for (const double sink : {1e3, -1e3}) {
    for (const DType dtype : {DType::kF64, DType::kF32}) {
      MergeProblem problem(dtype, 20, 8);
      fill_uniform(host_context(), problem.sinks, sink, sink, 1);
      const Result merged = problem.run_in_parts(context_, {0, 7, 20}, true);
      const Result whole = problem.run(context_, 0, 20, true);
      const double tolerance = dtype == DType::kF64 ? 1e-12 : 2e-6;
      expect_near_all(values_of(merged.out), values_of(whole.out), tolerance, "out");
      expect_near_all(values_of(merged.lse), values_of(whole.lse), tolerance, "lse");
      if (sink > 0) {
        EXPECT_EQ(values_of(whole.lse)[0], sink);
      }
    }
  }
}

// ---- merge_attention() alone, with numbers worked by hand --------------------------------------

const Dims kOneRow{1, 1, 1, 2};
const Dims kOneLse{1, 1, 1};

struct HandMerge {
  explicit HandMerge(double first_lse, double second_lse, DType lse_dtype = DType::kF64,
                     DType out_dtype = DType::kF32)
      : lse0(Tensor::from_values(lse_dtype, kOneLse, {first_lse})),
        lse1(Tensor::from_values(lse_dtype, kOneLse, {second_lse})),
        out(out_dtype, kOneRow) {}

  void run(const Context& context, const ConstTensorView& sinks = {}) {
    const ConstTensorView outs[] = {out0, out1};
    const ConstTensorView lses[] = {lse0, lse1};
    host_merge_attention(context, outs, lses, out, lse, sinks);
  }

  Tensor out0 = Tensor::from_values(DType::kF32, kOneRow, {4, 8});
  Tensor out1 = Tensor::from_values(DType::kF32, kOneRow, {8, -8});
  Tensor lse0;
  Tensor lse1;
  Tensor out;
  Tensor lse{DType::kF64, kOneLse};
};

class MergeByHand : public ContextTest {};
LADON_FOR_EACH_CONTEXT(MergeByHand);

TEST_P(MergeByHand, WeightsByLse) {
  HandMerge merge(0, std::log(3.0));  // a quarter and three quarters
  merge.run(context_);
  expect_near_all(values_of(merge.out), {7, -4}, 1e-6, "out");
  expect_near_all(values_of(merge.lse), {std::log(4.0)}, 1e-15, "lse");
  const Tensor sinks = Tensor::from_values(DType::kBF16, {1}, {0});  // one fifth more
  merge.run(context_, sinks);
  expect_near_all(values_of(merge.out), {7.0 * 4 / 5, -4.0 * 4 / 5}, 1e-6, "out");
  expect_near_all(values_of(merge.lse), {std::log(5.0)}, 1e-15, "lse");
}

TEST_P(MergeByHand, F64LsesKeepLargeScoresApart) {
  // In f32, 1e4 and 1e4 + log(3) would lose four digits of their difference.
  for (const double score : {1e4, -1e4, 1e8}) {
    HandMerge merge(score, score + std::log(3.0), DType::kF64, DType::kF64);
    merge.run(context_);
    const double tolerance = std::abs(score) * 1e-14;
    expect_near_all(values_of(merge.out), {7, -4}, tolerance, "out");
    expect_near_all(values_of(merge.lse), {score + std::log(4.0)}, tolerance, "lse");
  }
}

TEST_P(MergeByHand, WhatSawNothingIsNotRead) {
  HandMerge merge(-kInfinity, 2);
  merge.out0 = Tensor::from_values(DType::kF32, kOneRow, {kNaN, kInfinity});
  merge.run(context_);
  EXPECT_EQ(values_of(merge.out), (std::vector<double>{8, -8}));
  EXPECT_EQ(values_of(merge.lse), (std::vector<double>{2}));
}

TEST_P(MergeByHand, NothingSeenAtAll) {
  HandMerge merge(-kInfinity, -kInfinity);
  const Tensor sinks = Tensor::from_values(DType::kF32, {1}, {3});
  merge.run(context_, sinks);
  EXPECT_EQ(values_of(merge.out), (std::vector<double>{0, 0}));
  EXPECT_EQ(values_of(merge.lse), (std::vector<double>{-kInfinity}));
}

TEST_P(MergeByHand, NaNIsPassedOn) {
  for (const auto& [first, second] : {std::pair{kNaN, 1.0}, {1.0, kNaN}, {kNaN, -kInfinity}}) {
    HandMerge merge(first, second);
    merge.run(context_);
    for (const double value : values_of(merge.out)) EXPECT_TRUE(std::isnan(value));
    EXPECT_TRUE(std::isnan(values_of(merge.lse)[0]));
  }
}

TEST_P(MergeByHand, DtypesMayDiffer) {
  for (const DType lse_dtype : {DType::kF32, DType::kF64}) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      HandMerge merge(0, std::log(3.0), lse_dtype, dtype);
      merge.out0 = Tensor::copy_of(host_context(), merge.out0, dtype);
      merge.lse1 = Tensor::from_values(DType::kF64, kOneLse, {std::log(3.0)});
      merge.run(context_);
      expect_near_all(values_of(merge.out), {7, -4}, 8 * std::max(epsilon_of(dtype), 1e-15),
                      name_of(dtype));
    }
  }
}

}  // namespace
}  // namespace ladon::test
