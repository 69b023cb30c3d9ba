// Layer norm (an RMS norm of x less its mean) and norms with weights for each head: values against
// plain loops, gradients against finite differences and between types, and bits.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "layers/norm.h"
#include "support/contexts.h"
#include "support/finite_differences.h"
#include "support/host_context.h"

namespace ladon {
namespace {

using test::elements_of;
using Elements = std::vector<double>;

constexpr double kEpsilon = 1e-5;
constexpr double kOffset = 0.25;
constexpr std::int64_t kTokens = 5;

struct Kind {
  std::int64_t heads;  // rows of weights
  bool centered;

  NormConstants constants() const { return {kEpsilon, kOffset, centered}; }
  Dims rows(std::int64_t dim, std::int64_t tokens = kTokens) const { return {tokens, heads, dim}; }
  Dims weight(std::int64_t dim) const { return heads == 1 ? Dims{dim} : Dims{heads, dim}; }
  std::string name() const { return std::to_string(heads) + (centered ? " centered" : " plain"); }
};
constexpr Kind kKinds[] = {{1, true}, {3, true}, {3, false}};

/// In long double.
Elements expected_rows(const Kind& kind, const Elements& x, const Elements& weight,
                       std::int64_t dim) {
  Elements y;
  const auto length = static_cast<std::size_t>(dim);
  for (std::size_t row = 0; row * length < x.size(); ++row) {
    const std::vector<long double> from(x.data() + row * length, x.data() + (row + 1) * length);
    const double* const w = weight.data() + row % static_cast<std::size_t>(kind.heads) * length;
    long double mean = 0;
    for (const long double element : from) mean += kind.centered ? element : 0;
    mean /= static_cast<long double>(dim);
    long double squares = 0;
    for (const long double element : from) squares += (element - mean) * (element - mean);
    const long double rms =
        std::sqrt(squares / static_cast<long double>(dim) + static_cast<long double>(kEpsilon));
    for (std::size_t i = 0; i < length; ++i) {
      const auto factor = static_cast<long double>(w[i] + kOffset);
      y.push_back(static_cast<double>((from[i] - mean) / rms * factor));
    }
  }
  return y;
}

class LayerNorm : public test::ContextTest {};

TEST_P(LayerNorm, AgreesWithPlainLoops) {
  for (const Kind& kind : kKinds) {
    for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
      for (const std::int64_t dim : {1, 2, 7, 16, 33, 128, 257}) {
        Tensor host(DType::kF64, kind.rows(dim));
        // Far from 0, where a difference of squares would have no digits left.
        fill_normal(test::host_context(), host, 100, 1, 1);
        const Tensor x = there(Tensor::copy_of(test::host_context(), host, dtype));
        const Tensor weight = normal(dtype, kind.weight(dim), 2);
        Tensor y(context_, dtype, kind.rows(dim));
        rms_norm(context_, x, weight, kind.constants(), y);
        const Elements expected = expected_rows(kind, elements_of(x), elements_of(weight), dim);
        const Elements got = elements_of(y);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(got[i], expected[i],
                      0.5001 * epsilon_of(dtype) * std::fabs(expected[i]) + 1e-9 +
                          (dtype == DType::kF16 ? 0x1p-25 : 0))
              << kind.name() << " " << name_of(dtype) << " dim " << dim;
        }
      }
    }
  }
}

TEST_P(LayerNorm, BackwardAgreesWithFiniteDifferences) {
  for (const Kind& kind : kKinds) {
    for (const std::int64_t dim : {2, 7, 33}) {
      Tensor x = normal(DType::kF64, kind.rows(dim), 1);
      Tensor weight = normal(DType::kF64, kind.weight(dim), 2);
      const Tensor dy = normal(DType::kF64, kind.rows(dim), 3);
      Tensor dx(context_, DType::kF64, kind.rows(dim));
      Tensor dweight(context_, DType::kF64, kind.weight(dim));
      rms_norm_backward(context_, x, weight, kind.constants(), dy, dx, dweight);
      const auto loss = [&] {
        Tensor y(context_, DType::kF64, kind.rows(dim));
        rms_norm(context_, x, weight, kind.constants(), y);
        const Elements left = elements_of(y);
        const Elements right = elements_of(dy);
        return std::inner_product(left.begin(), left.end(), right.begin(), 0.0);
      };
      const auto expect_near = [&](const Elements& got, const Elements& expected) {
        for (std::size_t i = 0; i < expected.size(); ++i) {
          EXPECT_NEAR(got[i], expected[i], 2e-7 * (1 + std::fabs(expected[i])))
              << kind.name() << " dim " << dim;
        }
      };
      expect_near(elements_of(dx), test::slopes_of(context_, x, loss));
      expect_near(elements_of(dweight), test::slopes_of(context_, weight, loss));
    }
  }
}

TEST_P(LayerNorm, BackwardOfEveryTypeIsTheRoundedF64One) {
  for (const Kind& kind : kKinds) {
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      const std::int64_t dim = 33;
      const Dims shape = kind.rows(dim, 120);
      const Tensor x = normal(dtype, shape, 1);
      const Tensor weight = normal(dtype, kind.weight(dim), 2);
      const Tensor dy = normal(dtype, shape, 3);
      const auto wide = [&](const Tensor& t) { return Tensor::copy_of(context_, t, DType::kF64); };
      Tensor dx(context_, dtype, shape);
      Tensor dweight = normal(DType::kF32, kind.weight(dim), 4);
      Tensor expected_dx(context_, DType::kF64, shape);
      Tensor expected_dweight = wide(dweight);
      rms_norm_backward(context_, wide(x), wide(weight), kind.constants(), wide(dy), expected_dx,
                        expected_dweight);
      rms_norm_backward(context_, x, weight, kind.constants(), dy, dx, dweight);
      const auto expect_near = [&](const Tensor& got, const Tensor& expected, DType rounded) {
        const Elements a = elements_of(got);
        const Elements b = elements_of(expected);
        for (std::size_t i = 0; i < a.size(); ++i) {
          EXPECT_NEAR(a[i], b[i], 0.5001 * epsilon_of(rounded) * std::fabs(b[i]) + 1e-7)
              << kind.name() << " " << name_of(dtype);
        }
      };
      expect_near(dx, expected_dx, dtype);
      expect_near(dweight, expected_dweight, DType::kF32);
    }
  }
}

TEST_P(LayerNorm, TheSameBitsForAnyNumberOfThreadsAndInPlace) {
  for (const Kind& kind : kKinds) {
    const std::int64_t dim = 19;
    const Dims shape = kind.rows(dim, 300);
    const Tensor x = normal(DType::kF32, shape, 1);
    const Tensor weight = normal(DType::kF32, kind.weight(dim), 2);
    const Tensor dy = normal(DType::kF32, shape, 3);
    context_.synchronize();
    const auto run = [&](int threads) {
      const Context context = GetParam().context(threads);
      Tensor y = Tensor::copy_of(context, x);
      Tensor dx = Tensor::copy_of(context, dy);
      Tensor dweight(context, DType::kF32, kind.weight(dim));
      rms_norm(context, y, weight, kind.constants(), y);
      rms_norm_backward(context, x, weight, kind.constants(), dx, dx, dweight);
      context.synchronize();
      return std::vector<Elements>{elements_of(y), elements_of(dx), elements_of(dweight)};
    };
    const auto expected = run(1);
    for (const int threads : {2, 7}) EXPECT_EQ(run(threads), expected) << kind.name();
  }
}

LADON_FOR_EACH_CONTEXT(LayerNorm);

}  // namespace
}  // namespace ladon
