// The design's promises about values, one by one: rows that see nothing, what is masked, what is
// not finite, what is empty, and any size.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "core/element.h"
#include "ladon/attention.h"
#include "support/contexts.h"
#include "support/everywhere.h"
#include "support/host_calls.h"
#include "support/host_context.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class PromisedValues : public ContextTest {};

double value_at(const ConstTensorView& view, std::int64_t a, std::int64_t b, std::int64_t c,
                std::int64_t d) {
  return load_element(
      view.data(), view.dtype(),
      a * view.stride(0) + b * view.stride(1) + c * view.stride(2) + d * view.stride(3));
}

/// The kinds of problem in which some keys are hidden from some rows: many rows and few.
std::vector<Case> masked_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    for (const std::int64_t query_len : {3, 70}) {
      Case problem{.batch = 1,
                   .query_len = query_len,
                   .kv_len = 75,
                   .num_heads = 2,
                   .num_kv_heads = 1,
                   .head_dim = 20,
                   .value_dim = 17,
                   .dtype = dtype,
                   .kv_dtype = dtype};
      problem.causal = true;
      cases.push_back(problem);
      problem.window_left = 5;
      cases.push_back(problem);
      problem.mask.present = true;
      cases.push_back(problem);
      problem.causal = false;
      problem.window_left.reset();
      problem.mask.present = false;
      problem.bias.present = true;
      cases.push_back(problem);
    }
  }
  return cases;
}

TEST_P(PromisedValues, P1_RowsThatSeeNothingAreZero) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t query_len : {1, 5, 40, 150}) {
      // Bottom-right and more queries than keys: the first rows stand before every key. The sink
      // must not bring an empty row to life.
      Case problem{.batch = 2,
                   .query_len = query_len,
                   .kv_len = 3,
                   .num_heads = 4,
                   .num_kv_heads = 2,
                   .head_dim = 9,
                   .value_dim = 6,
                   .dtype = dtype,
                   .kv_dtype = dtype,
                   .causal = true,
                   .sinks = true};
      const CaseData data(problem);
      const CaseResults results = run(context_, data);
      EXPECT_EQ(check_case(context_, data, truth_of(data)), "");
      for (std::int64_t row = 0; row < query_len - 3; ++row) {
        EXPECT_EQ(load_element(results.lse.data(), results.lse.dtype(), row), -kInfinity);
        for (std::int64_t i = 0; i < 6; ++i) {
          EXPECT_EQ(value_at(results.out.view(), 0, row, 0, i), 0);
        }
        for (std::int64_t i = 0; i < 9; ++i)
          EXPECT_EQ(value_at(results.dq.view(), 0, row, 0, i), 0);
      }
    }
  }
}

TEST_P(PromisedValues, P1_AMaskOfAllFalseGivesZeroGradients) {
  const Case problem{.query_len = 33, .kv_len = 70, .num_heads = 2, .num_kv_heads = 2};
  const CaseData data(problem);
  AttentionOptions options = data.options();
  const Tensor mask(DType::kBool, {1, 1, 1, 1});
  options.mask = mask;
  Tensor out = Tensor::copy_of(host_context(), data.dout());
  Tensor lse(DType::kF32, data.lse_shape());
  host_attention(context_, data.q(), data.k(), data.v(), options, out, lse);
  Tensor dq(DType::kF32, data.q().shape());
  Tensor dk(DType::kF32, data.k().shape());
  Tensor dv(DType::kF32, data.v().shape());
  for (Tensor* tensor : {&dq, &dk, &dv}) fill_normal(host_context(), *tensor, 0, 1, 3);
  host_attention_backward(context_, data.q(), data.k(), data.v(), options,
                          {.out = out, .lse = lse, .dout = data.dout()},
                          {.dq = dq, .dk = dk, .dv = dv});
  for (const Tensor* tensor : {&out, &dq, &dk, &dv}) {
    for (std::int64_t i = 0; i < tensor->num_elements(); ++i) {
      ASSERT_EQ(tensor->data_as<float>()[i], 0);
    }
  }
  for (std::int64_t i = 0; i < lse.num_elements(); ++i) {
    EXPECT_EQ(lse.data_as<float>()[i], -kInfinity);
  }
}

/// Runs forward and backward with one element of one input changed, and compares with the run
/// before: rows of queries that do not see the key must keep their bits.
class Spoiled {
 public:
  Spoiled(const Context& context, const CaseData& data, std::int64_t key, double k_value,
          double v_value)
      : options_(data.options()),
        k_(Tensor::copy_of(host_context(), data.k())),
        v_(Tensor::copy_of(host_context(), data.v())),
        out(data.problem().dtype, data.out_shape()),
        lse(data.lse_dtype(), data.lse_shape()),
        dq(data.problem().dtype, data.q().shape()),
        dk(data.problem().dtype, data.k().shape()),
        dv(data.problem().dtype, data.v().shape()) {
    if (key >= 0) {
      set(k_, key, k_value);
      set(v_, key, v_value);
    }
    host_attention(context, data.q(), k_, v_, options_, out, lse);
    host_attention_backward(context, data.q(), k_, v_, options_,
                            {.out = out, .lse = lse, .dout = data.dout()},
                            {.dq = dq, .dk = dk, .dv = dv});
  }

 private:
  /// One number of the key, in the last column: a check of the first few would miss it.
  static void set(Tensor& tensor, std::int64_t key, double value) {
    if (value == 0) return;  // leave as it is
    const std::int64_t dim = tensor.size(3);
    store_element(tensor.data(), tensor.dtype(), key * dim + dim - 1, value);
  }

  AttentionOptions options_;
  Tensor k_, v_;

 public:
  Tensor out, lse, dq, dk, dv;
};

TEST_P(PromisedValues, P2_P3_WhatIsNotFiniteReachesTheRowsThatSeeItAndNoOther) {
  for (const Case& problem : masked_cases()) {
    const CaseData data(problem);
    const Spoiled clean(context_, data, -1, 0, 0);
    for (const std::int64_t key : {0, 1, 37, 74}) {
      for (const double bad : {kNaN, kInfinity, -kInfinity}) {
        for (const bool in_values : {false, true}) {
          const Spoiled spoiled(context_, data, key, in_values ? 0 : bad, in_values ? bad : 0);
          for (std::int64_t row = 0; row < problem.query_len; ++row) {
            for (std::int64_t head = 0; head < 2; ++head) {
              const bool sees = data.visible(0, head, row, key);
              const std::string where = problem.describe() + " key " + std::to_string(key) +
                                        " row " + std::to_string(row);
              const auto rows_of = [&](const Tensor& tensor) {
                return ConstTensorView(
                    tensor.view().slice(1, row, row + 1).slice(2, head, head + 1));
              };
              if (!sees) {
                ASSERT_TRUE(same_bits(rows_of(clean.out), rows_of(spoiled.out))) << where;
                ASSERT_TRUE(same_bits(rows_of(clean.dq), rows_of(spoiled.dq))) << where;
              } else if (std::isnan(bad)) {
                ASSERT_TRUE(std::isnan(value_at(spoiled.out, 0, row, head, 16))) << where;
              } else if (in_values) {
                ASSERT_FALSE(std::isfinite(value_at(spoiled.out, 0, row, head, 16))) << where;
              }
            }
          }
        }
      }
    }
  }
}

/// Spoils one row of q, of dout, or of both.
void expect_rows_apart(const Context& context_, bool spoil_query, bool spoil_dout) {
  for (const Case& problem : masked_cases()) {
    const CaseData data(problem);
    Tensor q = Tensor::copy_of(host_context(), data.q());
    Tensor dout = Tensor::copy_of(host_context(), data.dout());
    const std::int64_t row = problem.query_len / 2;
    const auto run_once = [&](Tensor& dq, Tensor& dk, Tensor& dv, Tensor& out) {
      Tensor lse(data.lse_dtype(), data.lse_shape());
      host_attention(context_, q, data.k(), data.v(), data.options(), out, lse);
      host_attention_backward(context_, q, data.k(), data.v(), data.options(),
                              {.out = out, .lse = lse, .dout = dout},
                              {.dq = dq, .dk = dk, .dv = dv});
    };
    const auto make = [&](const Dims& shape) { return Tensor(problem.dtype, shape); };
    Tensor dq[2] = {make(q.shape()), make(q.shape())};
    Tensor dk[2] = {make(data.k().shape()), make(data.k().shape())};
    Tensor dv[2] = {make(data.v().shape()), make(data.v().shape())};
    Tensor out[2] = {make(data.out_shape()), make(data.out_shape())};
    run_once(dq[0], dk[0], dv[0], out[0]);
    const auto spoil_last = [&](Tensor& tensor) {  // the last number of head 0
      const std::int64_t dim = tensor.size(3);
      store_element(tensor.data(), tensor.dtype(), row * tensor.size(2) * dim + dim - 1, kNaN);
    };
    if (spoil_query) spoil_last(q);
    if (spoil_dout) spoil_last(dout);
    run_once(dq[1], dk[1], dv[1], out[1]);
    for (std::int64_t other = 0; other < problem.query_len; ++other) {
      for (std::int64_t head = 0; head < 2; ++head) {
        const auto rows_of = [&](const Tensor& tensor) {
          return ConstTensorView(tensor.view().slice(1, other, other + 1).slice(2, head, head + 1));
        };
        if (other == row && head == 0) continue;
        ASSERT_TRUE(same_bits(rows_of(out[0]), rows_of(out[1]))) << problem.describe();
        ASSERT_TRUE(same_bits(rows_of(dq[0]), rows_of(dq[1]))) << problem.describe();
      }
    }
    for (std::int64_t key = 0; key < problem.kv_len; ++key) {
      const auto keys_of = [&](const Tensor& tensor) {
        return ConstTensorView(tensor.view().slice(1, key, key + 1));
      };
      if (data.visible(0, 0, row, key)) {
        ASSERT_TRUE(std::isnan(value_at(dk[1], 0, key, 0, 19))) << problem.describe();
        ASSERT_TRUE(std::isnan(value_at(dv[1], 0, key, 0, 16))) << problem.describe();
      } else {
        ASSERT_TRUE(same_bits(keys_of(dk[0]), keys_of(dk[1]))) << problem.describe();
        ASSERT_TRUE(same_bits(keys_of(dv[0]), keys_of(dv[1]))) << problem.describe();
      }
    }
  }
}

TEST_P(PromisedValues, P3_NaNInAQueryReachesItsOwnRowAndTheKeysItSees) {
  expect_rows_apart(context_, true, false);
}

TEST_P(PromisedValues, P3_NaNInAnOutputGradientReachesItsOwnRowAndTheKeysItSees) {
  expect_rows_apart(context_, false, true);
}

TEST(PromisedValuesEverywhere, P4_EmptyIsLegal) {
  for (const std::int64_t batch : {0, 2}) {
    for (const std::int64_t query_len : {0, 3}) {
      for (const std::int64_t kv_len : {0, 3}) {
        for (const Lengths lengths : {Lengths::kFull, Lengths::kPadded, Lengths::kPacked}) {
          expect_right_everywhere({.batch = batch,
                                   .query_len = query_len,
                                   .kv_len = kv_len,
                                   .num_heads = 2,
                                   .lengths = lengths,
                                   .bias = {.present = true},
                                   .sinks = true});
        }
      }
    }
  }
}

TEST(PromisedValuesEverywhere, P8_AnyLengthWorks) {
  for (const std::int64_t length : {1, 2, 3, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129}) {
    for (const std::int64_t other : {1, 7, 64, 67}) {
      for (const DType dtype : {DType::kF32, DType::kBF16}) {
        Case problem{.query_len = length,
                     .kv_len = other,
                     .num_heads = 3,
                     .num_kv_heads = 1,
                     .head_dim = 5,
                     .value_dim = 3,
                     .dtype = dtype,
                     .kv_dtype = dtype,
                     .memory = Memory::kSliced};
        expect_right_everywhere(problem);
        std::swap(problem.query_len, problem.kv_len);
        expect_right_everywhere(problem);
      }
    }
  }
}

TEST(PromisedValuesEverywhere, P8_AnyHeadDimWorks) {
  for (std::int64_t dim = 1; dim <= 67; ++dim) {
    for (const std::int64_t query_len : {2, 19}) {
      expect_right_everywhere({.query_len = query_len,
                               .kv_len = 21,
                               .head_dim = dim,
                               .value_dim = 68 - dim,
                               .dtype = dim % 3 == 0 ? DType::kF16 : DType::kF32,
                               .kv_dtype = dim % 3 == 0 ? DType::kF16 : DType::kF32,
                               .memory = Memory::kSliced});
    }
  }
}

TEST(PromisedValuesEverywhere, P8_VeryLongHeadsWork) {
  for (const std::int64_t query_len : {1, 19}) {
    expect_right_everywhere(
        {.query_len = query_len, .kv_len = 9, .head_dim = 1031, .value_dim = 777});
  }
}

LADON_FOR_EACH_CONTEXT(PromisedValues);

}  // namespace
}  // namespace ladon::test
