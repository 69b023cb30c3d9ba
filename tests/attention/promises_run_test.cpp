// The design's promises about how results come about: the same bits whatever runs next to them,
// linear memory, and use from many threads.

#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "ladon/attention.h"
#include "support/contexts.h"
#include "support/host_calls.h"
#include "support/host_context.h"
#include "support/run_case.h"
#include "support/sanitized.h"

namespace ladon::test {
namespace {

class PromisedRuns : public ContextTest {};

/// Shapes that take every path: tiles, decoding, key splits, several parts of the backward pass,
/// strips of several tiles, as many as the number of threads leaves together.
std::vector<Case> path_cases() {
  std::vector<Case> cases;
  const Case sizes[] = {
      {.batch = 3, .query_len = 70, .kv_len = 90, .num_heads = 4, .num_kv_heads = 2},
      {.batch = 2, .query_len = 1, .kv_len = 1500, .num_heads = 6, .num_kv_heads = 2},
      {.batch = 2, .query_len = 2, .kv_len = 1100, .num_heads = 16, .num_kv_heads = 1},
      {.batch = 2, .query_len = 20, .kv_len = 1300, .num_heads = 1, .num_kv_heads = 1},
      {.batch = 1, .query_len = 1100, .kv_len = 1100, .num_heads = 2, .num_kv_heads = 2},
  };
  for (Case problem : sizes) {
    problem.head_dim = 12;
    problem.value_dim = 10;
    problem.seed = 77;
    cases.push_back(problem);
    problem.causal = true;
    problem.lengths = Lengths::kPadded;
    problem.dtype = problem.kv_dtype = DType::kBF16;
    cases.push_back(problem);
    problem.lengths = Lengths::kPacked;
    problem.dtype = problem.kv_dtype = DType::kF32;
    problem.bias = {.present = true, .full = {false, true, false, true}};
    problem.sinks = true;
    problem.dropout = 0.3;
    problem.window_left = 700;
    cases.push_back(problem);
  }
  return cases;
}

TEST_P(PromisedRuns, P6_TheSameBitsForAnyNumberOfThreads) {
  for (const Case& problem : path_cases()) {
    const CaseData data(problem);
    const Context one = GetParam().context(1);
    const CaseResults expected = run(one, data);
    for (const int threads : {1, 2, 3, 7}) {
      const Context many = GetParam().context(threads);
      EXPECT_TRUE(test::same_bits(expected, run(many, data)))
          << threads << " threads: " << problem.describe();
    }
  }
}

/// One sequence of a batch, cut out and run alone.
void expect_same_alone(const Context& context, const CaseData& data, const CaseResults& whole,
                       std::size_t index) {
  const Case& problem = data.problem();
  const SequencePart& part = data.sequences()[index];
  const bool packed = problem.lengths == Lengths::kPacked;
  const std::int64_t batch = packed ? 0 : static_cast<std::int64_t>(index);
  const auto tokens = [&](const ConstTensorView& view, std::int64_t begin, std::int64_t length) {
    return ConstTensorView(view.slice(0, batch, batch + 1).slice(1, begin, begin + length));
  };
  const auto queries = [&](const ConstTensorView& view) {
    return tokens(view, part.query_begin, part.query_len);
  };
  const auto keys = [&](const ConstTensorView& view) {
    return tokens(view, part.kv_begin, part.kv_len);
  };
  AttentionOptions options = data.options();
  options.kv_lengths = {};
  options.query_offsets = {};
  options.kv_offsets = {};
  options.dropout.first_sequence = static_cast<std::int64_t>(index);
  if (problem.bias.present) options.bias = data.bias().slice(3, 0, part.kv_len);  // [1, H, 1, K]
  const auto make = [&](const ConstTensorView& like) { return Tensor(like.dtype(), like.shape()); };
  Tensor out = make(queries(whole.out.view()));
  Tensor lse(data.lse_dtype(), {1, problem.num_heads, part.query_len});
  Tensor dq = make(queries(data.q()));
  Tensor dk = make(keys(data.k()));
  Tensor dv = make(keys(data.v()));
  host_attention(context, queries(data.q()), keys(data.k()), keys(data.v()), options, out, lse);
  host_attention_backward(context, queries(data.q()), keys(data.k()), keys(data.v()), options,
                          {.out = out, .lse = lse, .dout = queries(data.dout())},
                          {.dq = dq, .dk = dk, .dv = dv});
  const ConstTensorView whole_lse =
      ConstTensorView(whole.lse)
          .slice(0, batch, batch + 1)
          .slice(2, part.query_begin, part.query_begin + part.query_len);
  const std::string where = problem.describe() + " sequence " + std::to_string(index);
  EXPECT_TRUE(same_bits(out, queries(whole.out.view()))) << where;
  EXPECT_TRUE(same_bits(lse, whole_lse)) << where;
  EXPECT_TRUE(same_bits(dq, queries(whole.dq.view()))) << where;
  EXPECT_TRUE(same_bits(dk, keys(whole.dk.view()))) << where;
  EXPECT_TRUE(same_bits(dv, keys(whole.dv.view()))) << where;
}

TEST_P(PromisedRuns, P6_TheSameBitsAloneAndInABatch) {
  for (const Case& problem : path_cases()) {
    const CaseData data(problem);
    const CaseResults whole = run(context_, data);
    for (std::size_t s = 0; s < data.sequences().size(); ++s) {
      expect_same_alone(context_, data, whole, s);
    }
  }
}

TEST_P(PromisedRuns, P6_ARowDoesNotDependOnTheRowsNextToIt) {
  // Under a causal mask, later tokens must not move a bit of earlier rows, though they share tiles.
  const Case problem{.query_len = 100,
                     .kv_len = 100,
                     .num_heads = 2,
                     .num_kv_heads = 1,
                     .head_dim = 32,
                     .value_dim = 32,
                     .causal = true};
  const CaseData data(problem);
  Tensor q = Tensor::copy_of(host_context(), data.q());
  Tensor k = Tensor::copy_of(host_context(), data.k());
  Tensor v = Tensor::copy_of(host_context(), data.v());
  const Tensor before = host_attention(context_, q, k, v, {.causal = true});
  const std::int64_t kept = 41;
  for (Tensor* tensor : {&q, &k, &v}) {
    fill_normal(host_context(), tensor->view().slice(1, kept, 100), 0, 30,
                99);  // large: every maximum moves
  }
  const Tensor after = host_attention(context_, q, k, v, {.causal = true});
  EXPECT_TRUE(same_bits(ConstTensorView(before.view().slice(1, 0, kept)),
                        ConstTensorView(after.view().slice(1, 0, kept))));
}

TEST_P(PromisedRuns, P6_ATileDoesNotDependOnTheStripItIsIn) {
  // One thread takes many tiles at once. What later tokens hold must not move a bit of earlier
  // rows, be it NaN: they share blocks of keys.
  const Context context = GetParam().context(1);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Tensor q(dtype, {1, 1500, 2, 24});
    Tensor k(dtype, {1, 1500, 1, 24});
    Tensor v(dtype, {1, 1500, 1, 24});
    fill_normal(host_context(), q.view(), 0, 1, 1);
    fill_normal(host_context(), k.view(), 0, 1, 2);
    fill_normal(host_context(), v.view(), 0, 1, 3);
    const AttentionOptions options{.causal = true, .window_left = 900};
    const Tensor before = host_attention(context, q, k, v, options);
    const std::int64_t kept = 1111;
    for (Tensor* tensor : {&q, &k, &v}) {
      // Of one NaN in each row: 16 bits of ones are NaN in both types.
      for (std::int64_t token = kept; token < 1500; ++token) {
        std::memset(tensor->view().slice(1, token, token + 1).data(), 0xff, 4);
      }
    }
    const Tensor after = host_attention(context, q, k, v, options);
    EXPECT_TRUE(same_bits(ConstTensorView(before.view().slice(1, 0, kept)),
                          ConstTensorView(after.view().slice(1, 0, kept))))
        << name_of(dtype);
  }
}

TEST_P(PromisedRuns, P6_TheSameBitsWhereTokensCollideInTheCache) {
  // Rows a multiple of 2 KiB apart are staged, those of the same numbers elsewhere are not.
  for (const DType dtype : {DType::kF32, DType::kF64, DType::kBF16}) {
    for (const bool rules : {false, true}) {
      Case problem{.batch = 2,
                   .query_len = 90,
                   .kv_len = 330,
                   .num_heads = 16,
                   .num_kv_heads = 8,
                   .head_dim = 64,
                   .value_dim = 64,
                   .dtype = dtype,
                   .kv_dtype = dtype};
      if (rules) {
        problem.scale = 40;  // scores so steep that their rows are scaled anew
        problem.causal = true;
        problem.bias = {.present = true, .full = {false, true, true, true}};
        problem.mask = {.present = true, .full = {true, false, true, true}};
      }
      const CaseResults expected = run(context_, CaseData(problem));
      problem.memory = Memory::kHeadsFirst;
      const CaseResults results = run(context_, CaseData(problem));
      EXPECT_TRUE(test::same_bits(results, expected)) << problem.describe();
    }
  }
}

// ---- memory ----------------------------------------------------------------------------------

/// Peak resident memory of this process in MiB; -1 where the system does not tell.
double peak_mib() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stod(line.substr(6)) / 1024;
  }
  return -1;
}

/// Makes the peak start again from what is resident now.
bool reset_peak() {
  std::ofstream control("/proc/self/clear_refs");
  control << 5;
  control.close();
  return control.good();
}

/// How much forward and backward raise the peak over inputs, outputs and gradients.
double extra_mib(const Context& context, std::int64_t length, std::int64_t dim,
                 const AttentionOptions& options) {
  const Dims shape{1, length, 1, dim};
  Tensor tensors[8];
  for (Tensor& tensor : tensors) {
    tensor = Tensor(DType::kF32, shape);
    fill_uniform(host_context(), tensor, -1, 1, 11);  // written, so resident
  }
  auto& [q, k, v, out, dout, dq, dk, dv] = tensors;
  Tensor lse(DType::kF32, {1, 1, length});
  fill_uniform(host_context(), lse, 0, 1, 12);
  if (!reset_peak()) return -1;
  const double before = peak_mib();
  attention(context, q, k, v, options, out, lse);
  attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = dout},
                     {.dq = dq, .dk = dk, .dv = dv});
  return peak_mib() - before;
}

TEST_P(PromisedRuns, P7_MemoryIsLinear) {
  if (GetParam().is_reference()) GTEST_SKIP() << "the reference is too slow at this length";
  if (!GetParam().is_cpu()) GTEST_SKIP() << "the host's memory is measured";
  if (kSanitized) GTEST_SKIP() << "sanitizers keep memory themselves";
  // A matrix of 6144 x 6144 floats would be 144 MiB.
  Tensor bias(DType::kF32, {1, 1, 1, 6144});
  const AttentionOptions every{.causal = true,
                               .window_left = 4000,
                               .bias = bias,
                               .softcap = 20,
                               .dropout = {.probability = 0.1}};
  for (const AttentionOptions& options : {AttentionOptions{}, every}) {
    const double extra = extra_mib(context_, 6144, 8, options);
    if (extra < 0) GTEST_SKIP() << "this system does not tell the peak of resident memory";
    EXPECT_LT(extra, 16);
  }
}

TEST(PromiseMemory, P7_At32768ForwardAndBackwardStayBelow64MiB) {
  if (kSanitized) GTEST_SKIP() << "sanitizers keep memory themselves";
  const Context context;
  if (context.isa() == Isa::kReference) GTEST_SKIP() << "the reference is too slow at this length";
  const double extra = extra_mib(context, 32768, 64, {});
  if (extra < 0) GTEST_SKIP() << "this system does not tell the peak of resident memory";
  std::printf("peak resident memory over inputs, outputs and gradients: %.1f MiB\n", extra);
  EXPECT_LE(extra, 64);
}

// ---- threads ---------------------------------------------------------------------------------

TEST_P(PromisedRuns, P9_ManyThreadsMayCallAtOnce) {
  Case problem{.batch = 2, .query_len = 40, .kv_len = 600, .num_heads = 2, .num_kv_heads = 1};
  problem.causal = true;
  problem.bias = {.present = true, .full = {false, true, true, true}};
  problem.dropout = 0.2;
  if (GetParam().is_reference()) problem.kv_len = 60;
  const CaseData data(problem);
  const CaseResults expected = run(context_, data);
  std::vector<std::thread> callers;
  std::vector<int> same(4);
  for (std::size_t i = 0; i < same.size(); ++i) {
    callers.emplace_back([&, i] {
      bool all = true;
      for (int turn = 0; turn < 3; ++turn)
        all = test::same_bits(expected, run(context_, data)) && all;
      same[i] = all ? 1 : 0;
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(same, std::vector<int>({1, 1, 1, 1}));
}

LADON_FOR_EACH_CONTEXT(PromisedRuns);

}  // namespace
}  // namespace ladon::test
