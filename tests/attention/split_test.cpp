// The library's own split of the keys, for few query rows, against the reference; and strided
// inputs and outputs of merge_attention().
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kHeads = 6;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 40;
constexpr std::int64_t kValueDim = 24;

struct SplitProblem {
  SplitProblem(DType dtype, std::int64_t query_len, std::int64_t kv_len, double mean = 0)
      : q(dtype, {2, query_len, kHeads, kHeadDim}),
        k(dtype, {2, kv_len, kKvHeads, kHeadDim}),
        v(dtype, {2, kv_len, kKvHeads, kValueDim}),
        sinks(DType::kF32, {kHeads}) {
    fill_normal(host_context(), q, mean, 1, 1);
    fill_normal(host_context(), k, mean, mean == 0 ? 1 : 0.01, 2);
    fill_normal(host_context(), v, 0, 1, 3);
    fill_normal(host_context(), sinks, 5, 1, 4);
    lengths = {kv_len, kv_len / 2};
  }

  Tensor q, k, v, sinks;
  std::vector<std::int64_t> lengths;
};

struct SplitResult {
  explicit SplitResult(const SplitProblem& problem)
      : out(problem.q.dtype(), {2, problem.q.size(1), kHeads, kValueDim}),
        lse(problem.q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32,
            {2, kHeads, problem.q.size(1)}) {}

  void run(const Context& context, const SplitProblem& problem, const AttentionOptions& options) {
    host_attention(context, problem.q, problem.k, problem.v, options, out, lse);
  }

  Tensor out;
  Tensor lse;
};

std::vector<double> values_of(const ConstTensorView& view) {
  const Tensor wide = Tensor::copy_of(host_context(), view, DType::kF64);
  return {wide.data_as<double>(), wide.data_as<double>() + wide.num_elements()};
}

class Split : public ContextTest {
 protected:
  void expect_as_reference(const SplitProblem& problem, const AttentionOptions& options,
                           double tolerance, const std::string& what) {
    const Context reference(ContextOptions{.num_threads = 2, .isa = Isa::kReference});
    SplitResult expected(problem);
    expected.run(reference, problem, options);
    SplitResult got(problem);
    got.run(context_, problem, options);
    const std::vector<double> outs[] = {values_of(got.out), values_of(expected.out)};
    for (std::size_t i = 0; i < outs[0].size(); ++i) {
      ASSERT_NEAR(outs[0][i], outs[1][i], tolerance) << what << " out at " << i;
    }
    const std::vector<double> lses[] = {values_of(got.lse), values_of(expected.lse)};
    const double lse_epsilon = epsilon_of(got.lse.dtype());
    for (std::size_t i = 0; i < lses[0].size(); ++i) {
      if (lses[0][i] == lses[1][i]) continue;  // -inf too
      ASSERT_NEAR(lses[0][i], lses[1][i], 16 * lse_epsilon * std::max(1.0, std::abs(lses[1][i])))
          << what << " lse at " << i;
    }
  }
};

LADON_FOR_EACH_CONTEXT(Split);

TEST_P(Split, EqualsTheReference) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t kv_len : {511, 512, 513, 1024, 1025, 5000}) {
      for (const std::int64_t query_len : {1, 2, 3}) {
        if (query_len != 1 && kv_len != 513 && kv_len != 1025) continue;
        const SplitProblem problem(dtype, query_len, kv_len);
        const std::string what = std::string(name_of(dtype)) + " " + std::to_string(kv_len);
        const double tolerance = 8 * epsilon_of(dtype);
        expect_as_reference(problem, {}, tolerance, what);
        expect_as_reference(problem,
                            {.causal = true, .kv_lengths = problem.lengths, .sinks = problem.sinks},
                            tolerance, what + " causal, padded, sinks");
        expect_as_reference(problem, {.window_left = 600, .softcap = 3}, tolerance,
                            what + " window");
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Split, RowsThatSeeNothingInSomePartsOrInAll) {
  for (const std::int64_t kv_len : {513, 1600}) {
    const SplitProblem problem(DType::kF32, 2, kv_len);
    Tensor mask(DType::kBool, {1, 1, 2, kv_len});
    mask.data_as<bool>()[kv_len - 1] = true;  // the first row sees the last key, the second none
    const double tolerance = 8 * epsilon_of(DType::kF32);
    expect_as_reference(problem, {.mask = mask}, tolerance, "one key");
    expect_as_reference(problem, {.mask = mask, .sinks = problem.sinks}, tolerance, "sinks");
    // At top left the two queries see the first two keys at most.
    expect_as_reference(problem, {.causal = true, .alignment = Alignment::kTopLeft}, tolerance,
                        "top left");
  }
}

TEST_P(Split, ScoresOfTenThousand) {
  // 40 products of 39.8^2, times 1 / sqrt(40): about 1e4.
  const double mean = std::sqrt(1e4 / std::sqrt(static_cast<double>(kHeadDim)));
  expect_as_reference(SplitProblem(DType::kF64, 1, 2000, mean), {}, 1e-10, "f64");
  expect_as_reference(SplitProblem(DType::kF32, 1, 2000, mean), {}, 2e-2, "f32");
}

TEST_P(Split, SameBitsForAnyNumberOfThreads) {
  const SplitProblem problem(DType::kF32, 1, 5000);
  SplitResult first(problem);
  first.run(GetParam().context(1), problem, {});
  for (const int threads : {2, 3, 7}) {
    SplitResult other(problem);
    other.run(GetParam().context(threads), problem, {});
    EXPECT_TRUE(same_bits(first.out, other.out)) << threads;
    EXPECT_TRUE(same_bits(first.lse, other.lse)) << threads;
  }
}

class MergeStrided : public ContextTest {};
LADON_FOR_EACH_CONTEXT(MergeStrided);

TEST_P(MergeStrided, GivesTheSameBits) {
  const Dims shape{2, 3, 4, 5};
  Tensor outs_memory(DType::kF32, {2, 2, 3, 4, 5});
  Tensor lses_memory(DType::kF32, {2, 2, 4, 3});
  fill_normal(host_context(), outs_memory, 0, 1, 1);
  fill_normal(host_context(), lses_memory, 0, 1, 2);
  const ConstTensorView outs[] = {outs_memory.view().select(0, 0), outs_memory.view().select(0, 1)};
  const ConstTensorView lses[] = {lses_memory.view().select(0, 0), lses_memory.view().select(0, 1)};
  Tensor sinks(DType::kF32, {4});
  fill_normal(host_context(), sinks, 0, 1, 3);
  Tensor out(DType::kF32, shape);
  Tensor lse(DType::kF32, {2, 4, 3});
  host_merge_attention(GetParam().context(1), outs, lses, out, lse, sinks);

  // Parts as heads-first arrays, lse as [query_len, batch, heads], sinks as every second number.
  const Tensor heads_first[] = {Tensor::copy_of(host_context(), outs[0].transpose(1, 2)),
                                Tensor::copy_of(host_context(), outs[1].transpose(1, 2))};
  const ConstTensorView strided_outs[] = {ConstTensorView(heads_first[0]).transpose(1, 2),
                                          ConstTensorView(heads_first[1]).transpose(1, 2)};
  const Tensor tokens_first[] = {Tensor::copy_of(host_context(), lses[0].transpose(0, 2)),
                                 Tensor::copy_of(host_context(), lses[1].transpose(0, 2))};
  const ConstTensorView strided_lses[] = {ConstTensorView(tokens_first[0]).transpose(0, 2),
                                          ConstTensorView(tokens_first[1]).transpose(0, 2)};
  Tensor sinks_memory(DType::kF32, {4, 2});
  copy(host_context(), sinks, sinks_memory.view().select(1, 1));
  Tensor out_memory(DType::kF32, {4, 2, 3, 7});
  const TensorView strided_out =
      out_memory.view().slice(3, 1, 6).transpose(0, 1).transpose(1, 2);  // [2, 3, 4, 5]
  Tensor lse_memory(DType::kF32, {3, 4, 2});
  const TensorView strided_lse = lse_memory.view().transpose(0, 2);
  host_merge_attention(GetParam().context(3), strided_outs, strided_lses, strided_out, strided_lse,
                       sinks_memory.view().select(1, 1));
  EXPECT_TRUE(same_bits(out, Tensor::copy_of(host_context(), strided_out)));
  EXPECT_TRUE(same_bits(lse, Tensor::copy_of(host_context(), strided_lse)));
  // The gaps were zero and still are.
  for (const std::int64_t gap : {0, 6}) {
    for (const double value : values_of(out_memory.view().select(3, gap))) EXPECT_EQ(value, 0);
  }
}

}  // namespace
}  // namespace ladon::test
