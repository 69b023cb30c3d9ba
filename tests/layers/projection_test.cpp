// Projections and their gradients on every instruction set: values against plain loops, nothing
// read or written outside the rows, and bits that depend on the row alone.
#include "layers/projection.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "core/element.h"
#include "ladon/random.h"
#include "ladon/tensor.h"
#include "support/contexts.h"

namespace ladon {
namespace {

constexpr DType kFloatTypes[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::int64_t kSizes[] = {1, 2, 3, 7, 15, 16, 17, 63, 64, 65, 129, 257};
constexpr long double kBound = 4;  // epsilons of the compute type, times the sum of all |terms|

DType sum_dtype(DType dtype) { return dtype == DType::kF64 ? DType::kF64 : DType::kF32; }

/// What the host sees of Rows.
struct Matrix {
  Tensor storage;
  std::int64_t begin, stride;

  long double at(std::int64_t row, std::int64_t column) const {
    return static_cast<long double>(
        load_element(storage.data(), storage.dtype(), begin + row * stride + column));
  }
};

/// A matrix inside a larger array that is NaN everywhere else, on a Context's device.
class Rows {
 public:
  enum class Layout { kDense, kStrided };

  Rows(const Context& context, DType dtype, std::int64_t rows, std::int64_t columns,
       std::uint64_t seed, Layout layout = Layout::kStrided)
      : stride_(layout == Layout::kDense ? columns : columns + 3),
        begin_(layout == Layout::kDense ? 0 : 5),
        storage_(test::poisoned(context, dtype, {begin_ + rows * stride_ + 32})) {
    view_ = TensorView(element_at(storage_.data(), dtype, begin_), dtype, {rows, columns},
                       {stride_, 1}, context.device());
    fill_normal(context, view_, 0, 1, seed);
    before_ = now();
  }

  const TensorView& view() const { return view_; }
  /// The first row as a vector.
  TensorView row() const { return view_.select(0, 0); }
  Matrix now() const { return {storage_.to_host(), begin_, stride_}; }
  /// What now() gave before any call.
  const Matrix& before() const { return before_; }
  /// Everything outside the matrix is as it was.
  bool guards_intact() const {
    Tensor all = storage_.to_host();
    for (std::int64_t row = 0; row < view_.size(0); ++row) {
      for (std::int64_t column = 0; column < view_.size(1); ++column) {
        store_element(all.data(), all.dtype(), begin_ + row * stride_ + column,
                      static_cast<double>(before_.at(row, column)));
      }
    }
    const auto bytes = static_cast<std::size_t>(all.num_elements()) * size_of(all.dtype());
    return std::memcmp(all.data(), before_.storage.data(), bytes) == 0;
  }

 private:
  std::int64_t stride_;
  std::int64_t begin_;
  Tensor storage_;
  TensorView view_;
  Matrix before_;
};

/// A sum worked in long double, and the sum of its terms' sizes.
struct Sum {
  long double value = 0;
  long double size = 0;

  void add(long double term) {
    value += term;
    size += std::fabs(term);
  }
};

/// How many times its bound an element's error is. `stored` is the dtype it was rounded to.
double error_ratio(long double got, const Sum& sum, DType compute, DType stored) {
  const long double smallest = stored == DType::kF16 ? 0x1p-25L : 0x1p-140L;
  const long double bound = kBound * static_cast<long double>(epsilon_of(compute)) * sum.size +
                            static_cast<long double>(epsilon_of(stored)) * std::fabs(sum.value) +
                            smallest;
  const long double error = std::fabs(got - sum.value);
  return std::isfinite(got) ? static_cast<double>(error / bound) : HUGE_VAL;
}

struct ProjectionSize {
  std::int64_t rows, in, out;
  std::string describe() const {
    return std::to_string(rows) + " rows, " + std::to_string(in) + " in, " + std::to_string(out) +
           " out";
  }
};

/// Every size in every place, among many others.
std::vector<ProjectionSize> sizes() {
  std::vector<ProjectionSize> all;
  const std::size_t count = std::size(kSizes);
  for (std::size_t turn = 0; turn < 4; ++turn) {
    for (std::size_t i = 0; i < count; ++i) {  // 5 and 7 have no divisor in common with 12
      all.push_back(
          {kSizes[i], kSizes[(5 * i + 3 * turn) % count], kSizes[(7 * i + 5 * turn) % count]});
    }
  }
  for (const std::int64_t in : {1, 16, 65}) all.push_back({0, in, 17});
  all.push_back({2, 1031, 67});  // beyond what is summed at once
  all.push_back({9, 1281, 6});
  all.push_back({70, 2049, 5});
  all.push_back({70, 3, 2100});  // columns of more than one block
  all.push_back({67, 5, 1031});
  all.push_back({1031, 67, 5});
  return all;
}

class Projection : public test::ContextTest {
 protected:
  Rows rows_of(DType dtype, std::int64_t rows, std::int64_t columns, std::uint64_t seed,
               Rows::Layout layout = Rows::Layout::kStrided) const {
    return Rows(context_, dtype, rows, columns, seed, layout);
  }
};

double worst_of_project(const Rows& x, const Rows& w, const Rows* b, const Rows& y) {
  double worst = 0;
  const DType compute = sum_dtype(x.view().dtype());
  const Matrix xs = x.now(), ws = w.now(), bs = b == nullptr ? Matrix() : b->now(), ys = y.now();
  for (std::int64_t row = 0; row < y.view().size(0); ++row) {
    for (std::int64_t out = 0; out < y.view().size(1); ++out) {
      Sum sum;
      for (std::int64_t in = 0; in < x.view().size(1); ++in) {
        sum.add(xs.at(row, in) * ws.at(out, in));
      }
      if (b != nullptr) sum.add(bs.at(0, out));
      worst = std::max(worst, error_ratio(ys.at(row, out), sum, compute, y.view().dtype()));
    }
  }
  return worst;
}

double worst_of_input_gradient(const Rows& dy, const Rows& w, const Rows& dx) {
  double worst = 0;
  const DType dtype = dx.view().dtype();
  const Matrix dys = dy.now(), ws = w.now(), dxs = dx.now();
  for (std::int64_t row = 0; row < dx.view().size(0); ++row) {
    for (std::int64_t in = 0; in < dx.view().size(1); ++in) {
      Sum sum;
      sum.add(dx.before().at(row, in));
      for (std::int64_t out = 0; out < dy.view().size(1); ++out) {
        sum.add(dys.at(row, out) * ws.at(out, in));
      }
      worst = std::max(worst, error_ratio(dxs.at(row, in), sum, dtype, dtype));
    }
  }
  return worst;
}

double worst_of_weight_gradient(const Rows& x, const Rows& dy, const Rows& dw, const Rows* db) {
  double worst = 0;
  const DType dtype = dw.view().dtype();
  const Matrix xs = x.now(), dys = dy.now(), dws = dw.now();
  for (std::int64_t out = 0; out < dw.view().size(0); ++out) {
    Sum bias;
    if (db != nullptr) bias.add(db->before().at(0, out));
    for (std::int64_t row = 0; row < dy.view().size(0); ++row) bias.add(dys.at(row, out));
    if (db != nullptr) {
      worst = std::max(worst, error_ratio(db->now().at(0, out), bias, dtype, dtype));
    }
    for (std::int64_t in = 0; in < dw.view().size(1); ++in) {
      Sum sum;
      sum.add(dw.before().at(out, in));
      for (std::int64_t row = 0; row < dy.view().size(0); ++row) {
        sum.add(dys.at(row, out) * xs.at(row, in));
      }
      worst = std::max(worst, error_ratio(dws.at(out, in), sum, dtype, dtype));
    }
  }
  return worst;
}

TEST_P(Projection, AgreesWithPlainLoops) {
  double worst = 0;
  std::uint64_t seed = 0;
  for (const DType dtype : kFloatTypes) {
    for (const auto& problem : sizes()) {
      const Rows x = rows_of(dtype, problem.rows, problem.in, ++seed);
      const Rows w = rows_of(dtype, problem.out, problem.in, ++seed);
      const Rows b = rows_of(dtype, 1, problem.out, ++seed);
      for (const bool bias : {false, true}) {
        const Rows y = rows_of(dtype, problem.rows, problem.out, ++seed);
        project(context_, x.view(), w.view(), bias ? b.row() : ConstTensorView(), y.view());
        const double ratio = worst_of_project(x, w, bias ? &b : nullptr, y);
        EXPECT_LE(ratio, 1) << name_of(dtype) << ", " << problem.describe() << ", bias " << bias;
        EXPECT_TRUE(y.guards_intact()) << name_of(dtype) << ", " << problem.describe();
        worst = std::max(worst, ratio);
      }
    }
  }
  RecordProperty("worst", std::to_string(worst));
}

TEST_P(Projection, TakesMixedTypes) {
  const auto check = [&](const ProjectionSize& problem, DType x_dtype, DType w_dtype,
                         DType y_dtype) {
    const Rows x = rows_of(x_dtype, problem.rows, problem.in, 1);
    const Rows w = rows_of(w_dtype, problem.out, problem.in, 2);
    const Rows b = rows_of(y_dtype, 1, problem.out, 3);
    const Rows y = rows_of(y_dtype, problem.rows, problem.out, 4);
    project(context_, x.view(), w.view(), b.row(), y.view());
    EXPECT_LE(worst_of_project(x, w, &b, y), 1)
        << name_of(x_dtype) << " " << name_of(w_dtype) << " " << name_of(y_dtype) << ", "
        << problem.describe();
    EXPECT_TRUE(y.guards_intact()) << problem.describe();
  };
  for (const DType x_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const DType w_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      for (const DType y_dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
        check({33, 65, 17}, x_dtype, w_dtype, y_dtype);
      }
      check({5, 1300, 9}, x_dtype, w_dtype, DType::kF32);
      check({67, 5, 4200}, x_dtype, w_dtype, DType::kF32);
    }
  }
}

TEST_P(Projection, InputGradientAgreesAndAdds) {
  std::uint64_t seed = 1000;
  for (const DType dtype : kFloatTypes) {
    for (const auto& problem : sizes()) {
      const Rows dy = rows_of(dtype, problem.rows, problem.out, ++seed);
      const Rows w = rows_of(dtype, problem.out, problem.in, ++seed);
      const Rows dx = rows_of(sum_dtype(dtype), problem.rows, problem.in, ++seed);
      add_input_gradient(context_, dy.view(), w.view(), dx.view());
      EXPECT_LE(worst_of_input_gradient(dy, w, dx), 1)
          << name_of(dtype) << ", " << problem.describe();
      EXPECT_TRUE(dx.guards_intact()) << name_of(dtype) << ", " << problem.describe();
    }
  }
}

TEST_P(Projection, WeightGradientAgreesAndAdds) {
  std::uint64_t seed = 2000;
  for (const DType dtype : kFloatTypes) {
    for (const auto& problem : sizes()) {
      const Rows x = rows_of(dtype, problem.rows, problem.in, ++seed);
      const Rows dy = rows_of(dtype, problem.rows, problem.out, ++seed);
      for (const bool bias : {false, true}) {
        const Rows dw = rows_of(sum_dtype(dtype), problem.out, problem.in, ++seed);
        const Rows db = rows_of(sum_dtype(dtype), 1, problem.out, ++seed);
        add_weight_gradient(context_, x.view(), dy.view(), dw.view(),
                            bias ? db.row() : TensorView());
        EXPECT_LE(worst_of_weight_gradient(x, dy, dw, bias ? &db : nullptr), 1)
            << name_of(dtype) << ", " << problem.describe() << ", bias " << bias;
        EXPECT_TRUE(dw.guards_intact()) << name_of(dtype) << ", " << problem.describe();
        EXPECT_TRUE(db.guards_intact()) << name_of(dtype) << ", " << problem.describe();
      }
    }
  }
}

TEST_P(Projection, NoRowsLeaveGradientsAsTheyAre) {
  const Rows x = rows_of(DType::kF32, 0, 9, 1);
  const Rows dy = rows_of(DType::kF32, 0, 70, 2);
  const Rows dw = rows_of(DType::kF32, 70, 9, 3);
  const Rows db = rows_of(DType::kF32, 1, 70, 4);
  add_weight_gradient(context_, x.view(), dy.view(), dw.view(), db.row());
  for (std::int64_t out = 0; out < 70; ++out) {
    EXPECT_EQ(db.now().at(0, out), db.before().at(0, out));
    for (std::int64_t in = 0; in < 9; ++in) {
      EXPECT_EQ(dw.now().at(out, in), dw.before().at(out, in));
    }
  }
}

// ---- bits ------------------------------------------------------------------------------------

const ProjectionSize kBitSizes[] = {{65, 1, 3},   {65, 17, 129}, {65, 64, 64}, {65, 257, 65},
                                    {65, 300, 1}, {65, 515, 70}, {65, 1300, 9}};

TEST_P(Projection, ARowsBitsAreItsOwn) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [rows, in, out] : kBitSizes) {
      const Rows x = rows_of(dtype, rows, in, 1);
      const Rows w = rows_of(dtype, out, in, 2);
      const Rows b = rows_of(dtype, 1, out, 3);
      const Rows dy = rows_of(dtype, rows, out, 4);
      const Rows y = rows_of(dtype, rows, out, 5);
      const Rows dx = rows_of(sum_dtype(dtype), rows, in, 6);
      project(context_, x.view(), w.view(), b.row(), y.view());
      add_input_gradient(context_, dy.view(), w.view(), dx.view());
      for (const std::int64_t row : {0, 1, 31, 63, 64}) {
        const std::string where =
            std::string(name_of(dtype)) + ", " + ProjectionSize{rows, in, out}.describe();
        const auto only = [row = row](const Rows& all) {
          return all.view().slice(0, row, row + 1);
        };
        Tensor alone(context_, dtype, {1, out});
        project(context_, only(x), w.view(), b.row(), alone);
        EXPECT_TRUE(same_bits(alone, only(y))) << where;
        for (const std::int64_t count : {2, 6, 9, 33}) {
          const std::int64_t first = std::max(row + 1 - count, std::int64_t{0});
          Tensor among(context_, dtype, {count, out});
          project(context_, x.view().slice(0, first, first + count), w.view(), b.row(), among);
          EXPECT_TRUE(same_bits(among.view().slice(0, row - first, row - first + 1), only(y)))
              << where << ", among " << count;
        }
        // dx has 6's elements in it before anything is added.
        const Rows fresh = rows_of(sum_dtype(dtype), rows, in, 6);
        Tensor gradient = Tensor::copy_of(context_, only(fresh));
        add_input_gradient(context_, only(dy), w.view(), gradient);
        EXPECT_TRUE(same_bits(gradient, only(dx))) << where;
      }
    }
  }
}

TEST_P(Projection, TheSameBitsForAnyNumberOfThreadsAndAnyStrides) {
  for (const DType dtype : kFloatTypes) {
    for (const auto& [rows, in, out] : kBitSizes) {
      struct Results {
        Rows y, dx, dw, db;
      };
      const auto run = [&, rows = rows, in = in, out = out](int threads, Rows::Layout layout) {
        const Context context = GetParam().context(threads);
        const Rows x = rows_of(dtype, rows, in, 1, layout);
        const Rows w = rows_of(dtype, out, in, 2, layout);
        const Rows b = rows_of(dtype, 1, out, 3, layout);
        const Rows dy = rows_of(dtype, rows, out, 4, layout);
        const DType sums = sum_dtype(dtype);
        Results results{rows_of(dtype, rows, out, 5, layout), rows_of(sums, rows, in, 6, layout),
                        rows_of(sums, out, in, 7, layout), rows_of(sums, 1, out, 8, layout)};
        context_.synchronize();
        project(context, x.view(), w.view(), b.row(), results.y.view());
        add_input_gradient(context, dy.view(), w.view(), results.dx.view());
        add_weight_gradient(context, x.view(), dy.view(), results.dw.view(), results.db.row());
        context.synchronize();
        return results;
      };
      const Results expected = run(1, Rows::Layout::kDense);
      for (const int threads : {1, 2, 3, 7}) {
        const Results results = run(threads, Rows::Layout::kStrided);
        const std::string where = std::string(name_of(dtype)) + ", " +
                                  ProjectionSize{rows, in, out}.describe() + ", " +
                                  std::to_string(threads) + " threads";
        EXPECT_TRUE(same_bits(expected.y.view(), results.y.view())) << where;
        EXPECT_TRUE(same_bits(expected.dx.view(), results.dx.view())) << where;
        EXPECT_TRUE(same_bits(expected.dw.view(), results.dw.view())) << where;
        EXPECT_TRUE(same_bits(expected.db.view(), results.db.view())) << where;
      }
    }
  }
}

TEST_P(Projection, BroadcastAndReversedRows) {
  const Rows x = rows_of(DType::kF32, 70, 33, 1, Rows::Layout::kDense);
  const Rows w = rows_of(DType::kF32, 19, 33, 2);
  Tensor expected(context_, DType::kF32, {70, 19});
  project(context_, x.view(), w.view(), {}, expected);
  const std::int64_t stride = x.view().stride(0);
  const ConstTensorView reversed(x.view().slice(0, 69, 70).data(), DType::kF32, {70, 33},
                                 {-stride, 1}, context_.device());
  const ConstTensorView broadcast(x.view().data(), DType::kF32, {70, 33}, {0, 1},
                                  context_.device());
  Tensor y(context_, DType::kF32, {70, 19});
  const auto line = [](const Tensor& all, std::int64_t row) { return all.view().select(0, row); };
  project(context_, reversed, w.view(), {}, y);
  for (std::int64_t row = 0; row < 70; ++row) {
    EXPECT_TRUE(same_bits(line(y, row), line(expected, 69 - row))) << row;
  }
  project(context_, broadcast, w.view(), {}, y);
  for (std::int64_t row = 0; row < 70; ++row) {
    EXPECT_TRUE(same_bits(line(y, row), line(expected, 0))) << row;
  }
}

LADON_FOR_EACH_CONTEXT(Projection);

}  // namespace
}  // namespace ladon
