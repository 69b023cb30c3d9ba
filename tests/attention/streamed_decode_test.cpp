// Decoding that streams tokens: the truth, and the bits of the other way to read keys and values,
// which heads-first memory takes.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "support/case.h"
#include "support/case_data.h"
#include "support/contexts.h"
#include "support/run_case.h"
#include "support/truth.h"

namespace ladon::test {
namespace {

class StreamedDecode : public ContextTest {
 protected:
  void expect_right(Case problem) {
    problem.memory = Memory::kDense;
    const CaseData streamed(problem);
    EXPECT_EQ(check_case(context_, streamed, truth_of(streamed)), "") << problem.describe();
    expect_same_bits(problem);
  }

  void expect_same_bits(Case problem) {
    problem.memory = Memory::kDense;
    const CaseResults results = run(context_, CaseData(problem));
    problem.memory = Memory::kHeadsFirst;
    EXPECT_TRUE(same_bits(results.out.view(), run(context_, CaseData(problem)).out.view()))
        << problem.describe();
  }
};

LADON_FOR_EACH_CONTEXT(StreamedDecode);

Case decode(std::int64_t heads, std::int64_t kv_len, std::int64_t head_dim, std::int64_t value_dim,
            std::int64_t group = 1) {
  return {.batch = 2,
          .query_len = 1,
          .kv_len = kv_len,
          .num_heads = heads * group,
          .num_kv_heads = heads,
          .head_dim = head_dim,
          .value_dim = value_dim};
}

TEST_P(StreamedDecode, EveryDtypeAndEndOfAGroup) {
  struct Types {
    DType q, kv;
  };
  for (const Types& types : std::vector<Types>{{DType::kF32, DType::kF32},
                                               {DType::kF64, DType::kF64},
                                               {DType::kF16, DType::kF16},
                                               {DType::kBF16, DType::kBF16},
                                               {DType::kF32, DType::kBF16},
                                               {DType::kF32, DType::kF16}}) {
    for (const std::int64_t kv_len : {1, 3, 4, 5, 64, 67}) {
      for (const std::int64_t group : {1, 3}) {
        Case problem = decode(9, kv_len, 72, 40, group);
        problem.dtype = types.q;
        problem.kv_dtype = types.kv;
        expect_right(problem);
      }
    }
  }
}

TEST_P(StreamedDecode, AnyNumberOfRows) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t group : {2, 5, 8}) {
      Case problem = decode(12, 147, 64, 48, group);
      problem.dtype = problem.kv_dtype = dtype;
      expect_right(problem);
    }
    Case problem = decode(9, 150, 64, 64, 2);  // the tokens of a draft
    problem.dtype = problem.kv_dtype = dtype;
    problem.query_len = 4;
    problem.causal = true;
    expect_right(problem);
  }
}

TEST_P(StreamedDecode, AnyNumberOfHeadsAndAnyHeadDim) {
  // 3 are not streamed, 70 are more than a task has.
  for (const std::int64_t heads : {3, 4, 11, 70}) {
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      for (const std::int64_t dim : {1, 64, 130}) {
        Case problem = decode(heads, 71, dim, dim + 3);
        problem.dtype = problem.kv_dtype = dtype;
        expect_same_bits(problem);
      }
    }
  }
}

TEST_P(StreamedDecode, ManyBlocksAndSplits) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case problem = decode(16, 1100, 40, 32);
    problem.dtype = problem.kv_dtype = dtype;
    problem.lengths = Lengths::kPadded;
    expect_right(problem);
  }
}

TEST_P(StreamedDecode, WhatIsMaskedIsNotRead) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    Case problem = decode(8, 150, 64, 48);
    problem.dtype = problem.kv_dtype = dtype;
    problem.causal = true;
    problem.window_left = 70;
    expect_right(problem);
    problem.window_left.reset();
    problem.mask = {.present = true, .full = {true, true, true, true}};
    problem.bias = {.present = true, .full = {false, true, true, true}};
    expect_right(problem);
  }
}

TEST_P(StreamedDecode, RulesOfScores) {
  Case problem = decode(10, 150, 64, 32);
  problem.softcap = 3;
  problem.alibi = true;
  problem.sinks = true;
  problem.dropout = 0.3;
  expect_right(problem);
}

}  // namespace
}  // namespace ladon::test
