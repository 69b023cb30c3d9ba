// RMS norm and its backward: values against plain loops, gradients against finite differences, in
// place, and bits that depend on the row alone.
#include "layers/norm.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "support/contexts.h"
#include "support/finite_differences.h"

namespace ladon {
namespace {

using test::elements_of;
using Elements = std::vector<double>;

constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::int64_t kDims[] = {1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 129, 257};
constexpr std::int64_t kRows[] = {0, 1, 2, 3, 7, 17, 255, 256, 257, 513};  // 256 make a task
constexpr double kEpsilon = 1e-5;
constexpr std::int64_t kGuard = 16;

DType sum_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

double at(const Elements& elements, std::int64_t index) {
  return elements[static_cast<std::size_t>(index)];
}

/// A dense output or input between two stretches of NaN.
class Guarded {
 public:
  Guarded(const Context& context, DType dtype, const Dims& shape, std::uint64_t seed) {
    const TensorView counted(nullptr, dtype, shape);
    size_ = counted.num_elements();
    storage_ = test::poisoned(context, dtype, {size_ + 2 * kGuard});
    view_ = TensorView(element_at(storage_.data(), dtype, kGuard), dtype, shape, context.device());
    fill_normal(context, view_, 0, 1, seed);
  }
  const TensorView& view() const { return view_; }
  Elements elements() const {
    const Elements all = elements_of(storage_);
    return {all.begin() + kGuard, all.end() - kGuard};
  }
  bool intact() const {
    const Elements all = elements_of(storage_);
    for (std::int64_t i = 0; i < kGuard; ++i) {
      if (!std::isnan(at(all, i)) || !std::isnan(at(all, kGuard + size_ + i))) return false;
    }
    return true;
  }

 private:
  std::int64_t size_ = 0;
  Tensor storage_;
  TensorView view_;
};

/// What one row gives, in long double.
std::vector<long double> expected_row(const Elements& x, const Elements& weight, std::int64_t row,
                                      double epsilon) {
  const auto dim = static_cast<std::int64_t>(weight.size());
  const auto wide = [](double value) { return static_cast<long double>(value); };
  long double sum = 0;
  for (std::int64_t i = 0; i < dim; ++i)
    sum += wide(at(x, row * dim + i)) * wide(at(x, row * dim + i));
  const long double rms = std::sqrt(sum / static_cast<long double>(dim) + wide(epsilon));
  std::vector<long double> y;
  for (std::int64_t i = 0; i < dim; ++i) {
    y.push_back(wide(at(x, row * dim + i)) / rms * wide(at(weight, i)));
  }
  return y;
}

/// One rounding to the result's dtype, and a few of double.
double bound_of(double value, DType dtype, double scale = 0) {
  const double rounding = 0.5001 * epsilon_of(dtype) * std::fabs(value);
  const double subnormal = dtype == DType::kF16 ? 0x1p-25 : 0x1p-149;
  return rounding + 300 * epsilon_of(DType::kF64) * (std::fabs(value) + scale) + subnormal;
}

class Norm : public test::ContextTest {};

TEST_P(Norm, AgreesWithPlainLoops) {
  std::uint64_t seed = 0;
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t dim : kDims) {
      for (const std::int64_t rows : {0, 1, 5}) {
        const Guarded x(context_, dtype, {rows, dim}, ++seed);
        const Guarded weight(context_, dtype, {dim}, ++seed);
        const Guarded y(context_, dtype, {rows, dim}, ++seed);
        rms_norm(context_, x.view(), weight.view(), kEpsilon, y.view());
        const Elements got = y.elements();
        for (std::int64_t row = 0; row < rows; ++row) {
          const auto expected = expected_row(x.elements(), weight.elements(), row, kEpsilon);
          for (std::int64_t i = 0; i < dim; ++i) {
            const auto value = static_cast<double>(expected[static_cast<std::size_t>(i)]);
            EXPECT_NEAR(at(got, row * dim + i), value, bound_of(value, dtype))
                << name_of(dtype) << " dim " << dim << " row " << row;
          }
        }
        EXPECT_TRUE(y.intact()) << name_of(dtype) << " dim " << dim;
      }
    }
  }
}

TEST_P(Norm, ByHand) {
  const Tensor x = there(Tensor::from_values(DType::kF64, {1, 2}, {3, -4}));
  const Tensor weight = there(Tensor::from_values(DType::kF64, {2}, {2, 0.5}));
  Tensor y(context_, DType::kF64, {1, 2});
  rms_norm(context_, x, weight, 3.5, y);  // mean of squares 12.5, root of 16
  EXPECT_DOUBLE_EQ(elements_of(y)[0], 1.5);
  EXPECT_DOUBLE_EQ(elements_of(y)[1], -0.5);
}

TEST_P(Norm, ZerosGiveZerosAndEpsilonKeepsThemFinite) {
  for (const DType dtype : kFloatTypes) {
    const Tensor x(context_, dtype, {3, 8});
    const Tensor weight = normal(dtype, {8}, 1);
    const Tensor dy = normal(dtype, {3, 8}, 2);
    Tensor y = normal(dtype, {3, 8}, 3);
    Tensor dx = normal(dtype, {3, 8}, 4);
    Tensor dweight(context_, sum_dtype(dtype), {8});
    rms_norm(context_, x, weight, 1e-6, y);
    rms_norm_backward(context_, x, weight, 1e-6, dy, dx, dweight);
    EXPECT_EQ(elements_of(y), Elements(24, 0));
    for (const double element : elements_of(dx)) EXPECT_TRUE(std::isfinite(element));
    EXPECT_EQ(elements_of(dweight), Elements(8, 0)) << name_of(dtype);
  }
}

TEST_P(Norm, TakesAnyRankAndWorksInPlace) {
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t dim : {1, 7, 64}) {
      const Tensor x = normal(dtype, {2, 3, 5, dim}, 1);
      const Tensor weight = normal(dtype, {dim}, 2);
      const Tensor dy = normal(dtype, {2, 3, 5, dim}, 3);
      Tensor y(context_, dtype, {2, 3, 5, dim});
      Tensor flat(context_, dtype, {30, dim});
      rms_norm(context_, x, weight, kEpsilon, y);
      rms_norm(context_, x.view().reshape({30, dim}), weight, kEpsilon, flat);
      EXPECT_TRUE(same_bits(y.view().reshape({30, dim}), flat));
      Tensor in_place = Tensor::copy_of(context_, x);
      rms_norm(context_, in_place, weight, kEpsilon, in_place);
      EXPECT_TRUE(same_bits(in_place, y)) << name_of(dtype) << " dim " << dim;

      Tensor dx(context_, dtype, {2, 3, 5, dim});
      Tensor dweight(context_, sum_dtype(dtype), {dim});
      rms_norm_backward(context_, x, weight, kEpsilon, dy, dx, dweight);
      Tensor back = Tensor::copy_of(context_, dy);
      Tensor dweight_in_place(context_, sum_dtype(dtype), {dim});
      rms_norm_backward(context_, x, weight, kEpsilon, back, back, dweight_in_place);
      EXPECT_TRUE(same_bits(back, dx)) << name_of(dtype) << " dim " << dim;
      EXPECT_TRUE(same_bits(dweight_in_place, dweight)) << name_of(dtype) << " dim " << dim;
    }
  }
}

// ---- backward --------------------------------------------------------------------------------

/// sum(dy * rms_norm(x)): its derivatives are what backward gives.
double objective(const Context& context, const Tensor& x, const Tensor& weight, const Tensor& dy) {
  Tensor y(context, DType::kF64, x.shape());
  rms_norm(context, x, weight, kEpsilon, y);
  const Elements left = elements_of(y);
  const Elements right = elements_of(dy);
  return std::inner_product(left.begin(), left.end(), right.begin(), 0.0);
}

TEST_P(Norm, BackwardAgreesWithFiniteDifferences) {
  for (const std::int64_t dim : {1, 2, 7, 16, 33}) {
    Tensor x = normal(DType::kF64, {4, dim}, 1);
    Tensor weight = normal(DType::kF64, {dim}, 2);
    const Tensor dy = normal(DType::kF64, {4, dim}, 3);
    const Guarded dx(context_, DType::kF64, {4, dim}, 4);
    const Guarded dweight(context_, DType::kF64, {dim}, 5);
    const Elements before = dweight.elements();
    rms_norm_backward(context_, x, weight, kEpsilon, dy, dx.view(), dweight.view());
    const auto loss = [&] { return objective(context_, x, weight, dy); };
    const auto expect_near = [&](const Elements& got, const Elements& expected) {
      for (std::size_t i = 0; i < expected.size(); ++i) {
        EXPECT_NEAR(got[i], expected[i], 1e-7 * (1 + std::fabs(expected[i]))) << "dim " << dim;
      }
    };
    expect_near(dx.elements(), test::slopes_of(context_, x, loss));
    Elements added = dweight.elements();
    std::transform(added.begin(), added.end(), before.begin(), added.begin(), std::minus<>());
    expect_near(added, test::slopes_of(context_, weight, loss));
    EXPECT_TRUE(dx.intact());
    EXPECT_TRUE(dweight.intact());
  }
}

/// Narrower types: the f64 gradient of the same numbers, rounded.
TEST_P(Norm, BackwardOfEveryTypeIsTheRoundedF64One) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t dim : kDims) {
      for (const std::int64_t rows : {0, 1, 300}) {
        if (rows == 300 && dim > 64) continue;
        const Guarded x(context_, dtype, {rows, dim}, 1);
        const Guarded weight(context_, dtype, {dim}, 2);
        const Guarded dy(context_, dtype, {rows, dim}, 3);
        const Guarded dx(context_, dtype, {rows, dim}, 4);
        const Guarded dweight(context_, DType::kF32, {dim}, 5);
        const auto wide = [&](const ConstTensorView& view) {
          return Tensor::copy_of(context_, view, DType::kF64);
        };
        Tensor expected_dx(context_, DType::kF64, {rows, dim});
        Tensor expected_dweight = wide(dweight.view());
        rms_norm_backward(context_, wide(x.view()), wide(weight.view()), kEpsilon, wide(dy.view()),
                          expected_dx, expected_dweight);
        rms_norm_backward(context_, x.view(), weight.view(), kEpsilon, dy.view(), dx.view(),
                          dweight.view());
        const auto expect_near = [&](const Elements& got, const Elements& expected, DType rounded,
                                     double scale) {
          ASSERT_EQ(got.size(), expected.size());
          for (std::size_t i = 0; i < got.size(); ++i) {
            EXPECT_NEAR(got[i], expected[i], bound_of(expected[i], rounded, scale))
                << name_of(dtype) << " dim " << dim;
          }
        };
        expect_near(dx.elements(), elements_of(expected_dx), dtype, 10);
        expect_near(dweight.elements(), elements_of(expected_dweight), DType::kF32, 300);
        EXPECT_TRUE(dx.intact());
        EXPECT_TRUE(dweight.intact());
      }
    }
  }
}

// ---- bits ------------------------------------------------------------------------------------

TEST_P(Norm, TheSameBitsForAnyNumberOfThreads) {
  for (const DType dtype : kFloatTypes) {
    for (const std::int64_t rows : kRows) {
      const std::int64_t dim = 19;
      const Tensor x = normal(dtype, {rows, dim}, 1);
      const Tensor weight = normal(dtype, {dim}, 2);
      const Tensor dy = normal(dtype, {rows, dim}, 3);
      Tensor expected_y(context_, dtype, {rows, dim});
      Tensor expected_dx(context_, dtype, {rows, dim});
      Tensor expected_dweight = normal(sum_dtype(dtype), {dim}, 4);
      context_.synchronize();
      const Context one = GetParam().context(1);
      rms_norm(one, x, weight, kEpsilon, expected_y);
      rms_norm_backward(one, x, weight, kEpsilon, dy, expected_dx, expected_dweight);
      one.synchronize();
      for (const int threads : {2, 3, 7}) {
        Tensor y(context_, dtype, {rows, dim});
        Tensor dx(context_, dtype, {rows, dim});
        Tensor dweight = normal(sum_dtype(dtype), {dim}, 4);
        context_.synchronize();
        const Context many = GetParam().context(threads);
        rms_norm(many, x, weight, kEpsilon, y);
        rms_norm_backward(many, x, weight, kEpsilon, dy, dx, dweight);
        many.synchronize();
        const std::string where = std::string(name_of(dtype)) + ", " + std::to_string(rows) +
                                  " rows, " + std::to_string(threads) + " threads";
        EXPECT_TRUE(same_bits(y, expected_y)) << where;
        EXPECT_TRUE(same_bits(dx, expected_dx)) << where;
        EXPECT_TRUE(same_bits(dweight, expected_dweight)) << where;
      }
    }
  }
}

TEST_P(Norm, ARowsBitsAreItsOwn) {
  for (const DType dtype : kFloatTypes) {
    const std::int64_t rows = 300;
    const std::int64_t dim = 33;
    const Tensor x = normal(dtype, {rows, dim}, 1);
    const Tensor weight = normal(dtype, {dim}, 2);
    const Tensor dy = normal(dtype, {rows, dim}, 3);
    Tensor y(context_, dtype, {rows, dim});
    Tensor dx(context_, dtype, {rows, dim});
    Tensor dweight(context_, sum_dtype(dtype), {dim});
    rms_norm(context_, x, weight, kEpsilon, y);
    rms_norm_backward(context_, x, weight, kEpsilon, dy, dx, dweight);
    for (const std::int64_t row : {0, 1, 64, 255, 256, 299}) {
      const auto only = [row = row](const Tensor& all) {
        return all.view().slice(0, row, row + 1);
      };
      Tensor alone(context_, dtype, {1, dim});
      rms_norm(context_, only(x), weight, kEpsilon, alone);
      EXPECT_TRUE(same_bits(alone, only(y))) << name_of(dtype) << " row " << row;
      rms_norm_backward(context_, only(x), weight, kEpsilon, only(dy), alone, dweight);
      EXPECT_TRUE(same_bits(alone, only(dx))) << name_of(dtype) << " row " << row;
    }
  }
}

LADON_FOR_EACH_CONTEXT(Norm);

}  // namespace
}  // namespace ladon
