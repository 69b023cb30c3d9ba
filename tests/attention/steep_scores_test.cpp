// Gradients of rows whose scores are so large that rounding them matters, on every instruction set.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "core/element.h"
#include "ladon/attention.h"
#include "ladon/random.h"
#include "support/isas.h"

namespace ladon::test {
namespace {

/// A call of one sequence and one KV head, forward and backward, with dout = 1.
struct SteepCase {
  SteepCase(DType dtype, std::int64_t queries, std::int64_t keys, std::int64_t dim)
      : q(dtype, {1, queries, 1, dim}), k(dtype, {1, keys, 1, dim}), v(dtype, {1, keys, 1, dim}) {}

  Tensor q, k, v;
  AttentionOptions options;
  Tensor out, lse, dout, dq, dk, dv, dbias, dsinks;

  void forward(const Context& context) {
    out = Tensor(q.dtype(), {1, q.size(1), 1, v.size(3)});
    lse = Tensor(q.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, {1, 1, q.size(1)});
    attention(context, q, k, v, options, out, lse);
  }
  void backward(const Context& context) {
    dout = Tensor(q.dtype(), out.shape());
    fill_constant(dout, 1);
    dq = Tensor(q.dtype(), q.shape());
    dk = Tensor(k.dtype(), k.shape());
    dv = Tensor(v.dtype(), v.shape());
    AttentionGradients gradients{.dq = dq, .dk = dk, .dv = dv};
    if (!options.bias.absent()) {
      dbias = Tensor(DType::kF64, options.bias.shape());
      gradients.dbias = dbias;
    }
    if (!options.sinks.absent()) {
      dsinks = Tensor(DType::kF64, options.sinks.shape());
      gradients.dsinks = dsinks;
    }
    attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = dout},
                       gradients);
  }
  void run(const Context& context) {
    forward(context);
    backward(context);
  }

  static void fill_constant(const Tensor& tensor, double value) {
    fill(tensor, [value](std::int64_t) { return value; });
  }
  static void fill(const Tensor& tensor, const std::function<double(std::int64_t)>& value) {
    for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
      store_element(const_cast<void*>(tensor.data()), tensor.dtype(), i, value(i));
    }
  }
};

double element(const Tensor& tensor, std::int64_t i) {
  return load_element(tensor.data(), tensor.dtype(), i);
}

void expect_all(const Tensor& tensor, double expected, double tolerance, const std::string& what) {
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    ASSERT_NEAR(element(tensor, i), expected, tolerance) << what << " at " << i;
  }
}

void expect_finite(const Tensor& tensor, const std::string& what) {
  for (std::int64_t i = 0; i < tensor.num_elements(); ++i) {
    ASSERT_TRUE(std::isfinite(element(tensor, i))) << what << " at " << i;
  }
}

/// The weights of every row sum to 1, so each column of dv sums to the number of rows.
void expect_weights_sum_to_one(const Tensor& dv, double rows, double tolerance,
                               const std::string& what) {
  const std::int64_t dim = dv.size(3);
  for (std::int64_t i = 0; i < dim; ++i) {
    double sum = 0;
    for (std::int64_t key = 0; key < dv.size(1); ++key) sum += element(dv, key * dim + i);
    ASSERT_NEAR(sum, rows, tolerance * rows) << what << ", column " << i;
  }
}

class SteepScores : public IsaTest {};

TEST_P(SteepScores, OneKeyHasAllTheWeight) {
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    SteepCase problem(dtype, 1, 1, 64);
    for (const Tensor* tensor : {&problem.q, &problem.k, &problem.v}) {
      SteepCase::fill_constant(*tensor, 60000);
    }
    problem.run(context_);
    expect_all(problem.dv, 1, 0, std::string(name_of(dtype)) + " dv");
    expect_all(problem.dq, 0, 0, std::string(name_of(dtype)) + " dq");
    expect_all(problem.dk, 0, 0, std::string(name_of(dtype)) + " dk");
  }
}

TEST_P(SteepScores, WeightsSumToOne) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t queries : {1, 4, 8, 9, 64, 150}) {
      for (const double size : {1e2, 1e3, 2e4}) {
        SteepCase problem(dtype, queries, 90, 64);
        fill_uniform(context_, problem.q, -size, size, 1);
        fill_uniform(context_, problem.k, -size, size, 2);
        fill_normal(context_, problem.v, 0, 1, 3);
        problem.run(context_);
        const std::string what = std::string(name_of(dtype)) + ", " + std::to_string(queries) +
                                 " rows of " + std::to_string(size);
        expect_weights_sum_to_one(problem.dv, static_cast<double>(queries),
                                  dtype == DType::kF32 ? 1e-4 : 2e-2, what);
        expect_finite(problem.dq, what);
        expect_finite(problem.dk, what);
      }
    }
  }
}

TEST_P(SteepScores, EqualScoresShareTheWeight) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t queries : {1, 20}) {
      for (const std::int64_t keys : {64, 700}) {
        SteepCase problem(dtype, queries, keys, 32);
        for (const Tensor* tensor : {&problem.q, &problem.k, &problem.v}) {
          SteepCase::fill_constant(*tensor, 133120);
        }
        problem.run(context_);
        const double share = static_cast<double>(queries) / static_cast<double>(keys);
        expect_all(problem.dv, share, share * (dtype == DType::kF32 ? 1e-5 : 1e-2), "dv");
        expect_all(problem.dq, 0, 0, "dq");
        expect_all(problem.dk, 0, 0, "dk");
      }
    }
  }
}

TEST_P(SteepScores, BiasesOfAllKeysShareTheWeight) {
  for (const double size : {-1e9, 1e9, -3e38}) {
    SteepCase problem(DType::kF32, 12, 100, 16);
    fill_normal(context_, problem.q, 0, 1e-3, 1);
    fill_normal(context_, problem.k, 0, 1e-3, 2);
    fill_normal(context_, problem.v, 0, 1, 3);
    Tensor bias(DType::kF32, {1, 1, 1, 100});
    SteepCase::fill_constant(bias, size);
    problem.options.bias = bias;
    problem.run(context_);
    expect_all(problem.dv, 0.12, 1e-5, "dv");
    double sum = 0;
    for (std::int64_t i = 0; i < 100; ++i) sum += element(problem.dbias, i);
    EXPECT_NEAR(sum, 0, 1e-3);
  }
}

TEST_P(SteepScores, ASinkTakesItsShare) {
  for (const double size : {0.0, 1e8, -1e8}) {
    SteepCase problem(DType::kF32, 10, 3, 16);
    Tensor sinks(DType::kF32, {1});
    SteepCase::fill_constant(sinks, size);
    Tensor bias(DType::kF32, {1, 1, 1, 1});
    SteepCase::fill_constant(bias, size);
    problem.options.sinks = sinks;
    problem.options.bias = bias;
    SteepCase::fill_constant(problem.v, 1);
    problem.run(context_);
    expect_all(problem.dv, 10.0 / 4, 1e-5, "dv");
    // out = 3 / 4 of 16 ones; the sink's own weight is 1 / 4.
    EXPECT_NEAR(element(problem.dsinks, 0), -10 * 0.25 * 0.75 * 16, 1e-3);
    // All scores with the bias against the sink.
    EXPECT_NEAR(element(problem.dbias, 0), 10 * 0.25 * 0.75 * 16, 1e-3);
  }
}

TEST_P(SteepScores, ProductsThatCancel) {
  // Large products with alternating signs: scores near 0, and rounding of up to 1e3.
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t queries : {1, 5, 30}) {
      SteepCase problem(dtype, queries, 40, 63);
      Random random(7);
      SteepCase::fill(problem.q, [&](std::int64_t i) {
        return (i % 2 == 0 ? 1 : -1) * (40000 + 1000 * random.uniform());
      });
      SteepCase::fill(problem.k, [&](std::int64_t) { return 40000 + 1000 * random.uniform(); });
      fill_normal(context_, problem.v, 0, 1, 3);
      problem.run(context_);
      expect_weights_sum_to_one(problem.dv, static_cast<double>(queries),
                                dtype == DType::kF32 ? 1e-4 : 2e-2, name_of(dtype));
    }
  }
}

TEST_P(SteepScores, PartsOfTheKeysWithTheWholesLse) {
  // What ring attention does: each part of the keys, backward with the lse over all of them.
  SteepCase whole(DType::kF32, 20, 128, 32);
  fill_normal(context_, whole.q, 0, 300, 1);
  fill_normal(context_, whole.k, 0, 300, 2);
  fill_normal(context_, whole.v, 0, 1, 3);
  whole.run(context_);
  for (const std::int64_t first : {0, 64}) {
    SteepCase part(DType::kF32, 20, 64, 32);
    const auto copy_keys = [first](const Tensor& from, const Tensor& to) {
      SteepCase::fill(to, [&](std::int64_t i) { return element(from, first * 32 + i); });
    };
    part.q = Tensor::copy_of(context_, whole.q);
    part.out = Tensor::copy_of(context_, whole.out);
    part.lse = Tensor::copy_of(context_, whole.lse);
    copy_keys(whole.k, part.k);
    copy_keys(whole.v, part.v);
    part.backward(context_);
    for (std::int64_t i = 0; i < part.dv.num_elements(); ++i) {
      ASSERT_NEAR(element(part.dv, i), element(whole.dv, first * 32 + i), 2e-2) << first << i;
    }
  }
}

TEST_P(SteepScores, AMaskedKeyOfAnySizeChangesNoBit) {
  Tensor expected_dq, expected_dv;
  for (const double garbage : {0.0, 1e30}) {
    SteepCase problem(DType::kF32, 20, 70, 32);
    fill_normal(context_, problem.q, 0, 1, 1);
    fill_normal(context_, problem.k, 0, 1, 2);
    fill_normal(context_, problem.v, 0, 1, 3);
    for (std::int64_t i = 0; i < 32; ++i) {
      store_element(problem.k.data(), DType::kF32, 40 * 32 + i, garbage);
    }
    Tensor mask(DType::kBool, {1, 1, 1, 70});
    for (std::int64_t key = 0; key < 70; ++key) mask.data_as<bool>()[key] = key != 40;
    problem.options.mask = mask;
    problem.run(context_);
    if (garbage != 0) {
      EXPECT_EQ(std::memcmp(expected_dq.data(), problem.dq.data(), 20 * 32 * sizeof(float)), 0);
      EXPECT_EQ(std::memcmp(expected_dv.data(), problem.dv.data(), 70 * 32 * sizeof(float)), 0);
    }
    expected_dq = std::move(problem.dq);
    expected_dv = std::move(problem.dv);
  }
}

LADON_FOR_EACH_ISA(SteepScores);

}  // namespace
}  // namespace ladon::test
