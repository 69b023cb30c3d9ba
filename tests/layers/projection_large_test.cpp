// Projections and gradients that are large enough for every kind of kernel: values of some elements
// against plain loops, and bits that do not depend on the rows that are computed together.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "core/compute_dtype.h"
#include "core/element.h"
#include "ladon/tensor.h"
#include "layers/projection.h"
#include "support/contexts.h"
#include "support/sanitized.h"

namespace ladon {
namespace {

/// A matrix [rows, columns] of the host's.
class HostMatrix {
 public:
  explicit HostMatrix(const Tensor& tensor) : tensor_(tensor.to_host()) {}
  long double at(std::int64_t row, std::int64_t column) const {
    return static_cast<long double>(
        load_element(tensor_.data(), tensor_.dtype(), row * tensor_.size(1) + column));
  }

 private:
  Tensor tensor_;
};

/// A sum in long double, and the sum of its terms' sizes.
struct Sum {
  long double value = 0;
  long double size = 0;
  void add(long double term) {
    value += term;
    size += std::fabs(term);
  }
};

/// The bound of docs/numerics.md with c = 4, which random terms are far below.
void expect_close(long double got, const Sum& sum, DType stored) {
  const long double bound =
      4 * 0x1p-23L * sum.size + static_cast<long double>(epsilon_of(stored)) * std::fabs(sum.value);
  EXPECT_LE(std::fabs(got - sum.value), bound) << static_cast<double>(sum.value);
}

/// Of a size that the kernels of a GPU want; a sanitizer runs those of a CPU alone, and slowly.
constexpr std::int64_t large(std::int64_t size) { return test::kSanitized ? size / 4 : size; }

/// Some indices below `count`: the first, the last, those next to tiles' edges, and others.
std::vector<std::int64_t> some_of(std::int64_t count) {
  std::vector<std::int64_t> some;
  for (const std::int64_t index : {0, 7, 63, 64, 127, 128, 255, 700, 1100, 1535}) {
    if (index < count - 1) some.push_back(index);
  }
  some.push_back(count - 1);
  return some;
}

class LargeProjection : public test::ContextTest {
 protected:
  void expect_weight_gradient(DType x_dtype, DType dy_dtype, std::int64_t rows, std::int64_t in,
                              std::int64_t out) {
    const Tensor x = normal(x_dtype, {rows, in}, 1);
    const Tensor dy = normal(dy_dtype, {rows, out}, 2);
    Tensor dw = normal(DType::kF32, {out, in}, 3);
    Tensor db = normal(DType::kF32, {1, out}, 4);
    const HostMatrix before(dw), bias_before(db);
    add_weight_gradient(context_, x, dy, dw, db.view().select(0, 0));
    const HostMatrix xs(x), dys(dy), dws(dw), dbs(db);
    for (const std::int64_t o : some_of(out)) {
      Sum bias;
      bias.add(bias_before.at(0, o));
      for (std::int64_t row = 0; row < rows; ++row) bias.add(dys.at(row, o));
      expect_close(dbs.at(0, o), bias, DType::kF32);
      for (const std::int64_t i : some_of(in)) {
        Sum sum;
        sum.add(before.at(o, i));
        for (std::int64_t row = 0; row < rows; ++row) sum.add(dys.at(row, o) * xs.at(row, i));
        expect_close(dws.at(o, i), sum, DType::kF32);
      }
    }
  }

  void expect_same_rows(DType dtype, std::int64_t rows, std::int64_t in, std::int64_t out) {
    const Tensor x = normal(dtype, {rows, in}, 1);
    const Tensor w = normal(dtype, {out, in}, 2);
    const Tensor b = normal(dtype, {out}, 3);
    Tensor y(context_, dtype, {rows, out});
    project(context_, x, w, b, y);
    const HostMatrix xs(x), ws(w), bs(Tensor::copy_of(context_, b.view().reshape({1, out}))), ys(y);
    for (const std::int64_t row : some_of(rows)) {
      for (const std::int64_t count : {1, 8, 12, 40, 600}) {
        const std::int64_t first = std::max(row + 1 - count, std::int64_t{0});
        Tensor among(context_, dtype, {count, out});
        project(context_, x.view().slice(0, first, first + count), w, b, among);
        EXPECT_TRUE(same_bits(among.view().slice(0, row - first, row - first + 1),
                              y.view().slice(0, row, row + 1)))
            << "row " << row << " among " << count;
      }
      for (const std::int64_t o : some_of(out)) {
        Sum sum;
        sum.add(bs.at(0, o));
        for (std::int64_t i = 0; i < in; ++i) sum.add(xs.at(row, i) * ws.at(o, i));
        expect_close(ys.at(row, o), sum, dtype);
      }
    }
  }

  /// Three gradients of one call have the bits of three calls.
  void expect_together(const ConstTensorView& of_query, const ConstTensorView& of_key,
                       const ConstTensorView (&dys)[3]) {
    const ConstTensorView xs[] = {of_query, of_key, of_key};
    std::vector<Tensor> alone, together;
    std::vector<WeightGradient> gradients;
    for (std::size_t i = 0; i < 3; ++i) {
      const std::int64_t out = dys[i].size(1);
      alone.push_back(normal(DType::kF32, {out + 1, of_query.size(1)}, 30 + i));
      together.push_back(Tensor::copy_of(context_, alone[i]));
      const auto weights = [out](Tensor& all) { return all.view().slice(0, 0, out); };
      add_weight_gradient(context_, xs[i], dys[i], weights(alone[i]), {});
      gradients.push_back({xs[i], dys[i], weights(together[i]), {}});
    }
    add_weight_gradients(context_, gradients);
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(together[i], alone[i])) << i;
  }

  void expect_input_gradient(DType w_dtype, DType dy_dtype, std::int64_t rows, std::int64_t in,
                             std::int64_t out) {
    const Tensor w = normal(w_dtype, {out, in}, 1);
    const Tensor dy = normal(dy_dtype, {rows, out}, 2);
    Tensor dx = normal(DType::kF32, {rows, in}, 3);
    const Tensor copy = Tensor::copy_of(context_, dx);
    const HostMatrix before(dx);
    add_input_gradient(context_, dy, w, dx);
    const HostMatrix ws(w), dys(dy), dxs(dx);
    for (const std::int64_t row : some_of(rows)) {
      Tensor alone = Tensor::copy_of(context_, copy.view().slice(0, row, row + 1));
      add_input_gradient(context_, dy.view().slice(0, row, row + 1), w, alone);
      EXPECT_TRUE(same_bits(alone, dx.view().slice(0, row, row + 1))) << row;
      for (const std::int64_t i : some_of(in)) {
        Sum sum;
        sum.add(before.at(row, i));
        for (std::int64_t o = 0; o < out; ++o) sum.add(dys.at(row, o) * ws.at(o, i));
        expect_close(dxs.at(row, i), sum, DType::kF32);
      }
    }
  }
};

TEST_P(LargeProjection, RowsHaveTheSameBitsInEveryNumberOfRows) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    expect_same_rows(dtype, large(1600), large(1544), large(1600));
    expect_same_rows(dtype, large(1600), 264, large(1544));
  }
}

TEST_P(LargeProjection, InputGradients) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    expect_input_gradient(dtype, dtype, large(1600), large(1544), large(1600));
  }
}

TEST_P(LargeProjection, WeightGradients) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    // More rows than are summed at once.
    expect_weight_gradient(dtype, dtype, 9001, large(1104), large(1096));
    expect_weight_gradient(dtype, dtype, 20011, 40, 71);  // few weights
    expect_weight_gradient(dtype, dtype, 300, large(1056), large(2700));
  }
}

/// As of q, k and v, whose weights have other sizes: of one input, of two of other lengths, with a
/// gradient whose rows are not aligned, and with one in f32.
TEST_P(LargeProjection, WeightGradientsTogether) {
  constexpr std::int64_t kRows = 300, kKeys = 410, kIn = large(1040), kOut = large(2048),
                         kKvOut = 256;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    const Tensor x = normal(dtype, {kRows, kIn}, 1);
    const Tensor keys = normal(dtype, {kKeys, kIn}, 2);
    const Tensor dq = normal(dtype, {kRows, kOut}, 3);
    const Tensor dkv = normal(dtype, {kKeys, 2 * kKvOut + 1}, 4);
    const Tensor dk = normal(dtype, {kKeys, kKvOut}, 5);
    const Tensor dv = normal(dtype, {kKeys, kKvOut}, 6);
    const Tensor dv_f32 = normal(DType::kF32, {kKeys, kKvOut}, 7);
    const ConstTensorView unaligned = dkv.view().slice(1, kKvOut + 1, 2 * kKvOut + 1);
    const auto first = [](const ConstTensorView& view) { return view.slice(0, 0, kRows); };
    expect_together(x, x, {dq, first(dk), first(dv)});
    expect_together(x, keys, {dq, dk, dv});
    expect_together(x, x, {dq, first(unaligned), first(dv)});
    expect_together(x, keys, {dq, unaligned, dv});
    expect_together(x, keys, {dq, dv_f32, dk});
  }
}

/// In the dtype of the weights.
TEST_P(LargeProjection, SumsOfInputGradients) {
  constexpr std::int64_t kRows = large(1600), kIn = large(1544), kOut = 320, kKvOut = 72;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const Tensor dq = normal(dtype, {kRows, kOut}, 1), w_q = normal(dtype, {kOut, kIn}, 2);
    const Tensor dk = normal(dtype, {kRows, kKvOut}, 3), w_k = normal(dtype, {kKvOut, kIn}, 4);
    Tensor dx(context_, dtype, {kRows, kIn});
    const GradientTerm terms[] = {{dq, w_q}, {dk, w_k}};
    sum_input_gradients(context_, terms, dx);
    const HostMatrix dqs(dq), wqs(w_q), dks(dk), wks(w_k), dxs(dx);
    for (const std::int64_t row : some_of(kRows)) {
      const auto row_of = [row](const ConstTensorView& all) { return all.slice(0, row, row + 1); };
      const GradientTerm of_row[] = {{row_of(dq), w_q}, {row_of(dk), w_k}};
      Tensor alone(context_, dtype, {1, kIn});
      sum_input_gradients(context_, of_row, alone);
      EXPECT_TRUE(same_bits(alone, row_of(dx))) << name_of(dtype) << ", row " << row;
      for (const std::int64_t i : some_of(kIn)) {
        Sum sum;
        for (std::int64_t o = 0; o < kOut; ++o) sum.add(dqs.at(row, o) * wqs.at(o, i));
        for (std::int64_t o = 0; o < kKvOut; ++o) sum.add(dks.at(row, o) * wks.at(o, i));
        expect_close(dxs.at(row, i), sum, dtype);
      }
    }
  }
}

TEST_P(LargeProjection, GradientsInF32NextToWeightsIn16Bits) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    SCOPED_TRACE(name_of(dtype));
    expect_input_gradient(dtype, DType::kF32, 300, 200, 147);
    expect_weight_gradient(dtype, DType::kF32, 300, 200, 147);
    expect_weight_gradient(dtype, DType::kF32, 2100, 67, 33);
  }
}

TEST_P(LargeProjection, HeadsHaveTheBitsOfSeparateCalls) {
  constexpr std::int64_t kHeads = 5, kIn = 72, kOut = 40;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t rows : {3, 70, 600}) {
      const Tensor x = normal(dtype, {rows, kHeads * kIn}, 1);
      const Tensor w = normal(dtype, {kHeads * kOut, kIn}, 2);
      const auto head_of = [](const auto& view, std::int64_t head, std::int64_t width) {
        return view.slice(1, head * width, (head + 1) * width);
      };
      Tensor y(context_, dtype, {rows, kHeads * kOut});
      Tensor dx(context_, DType::kF32, {rows, kHeads * kIn});
      const HeadSteps steps{.heads = kHeads, .x = kIn, .w = kOut * kIn, .y = kOut};
      project(context_, head_of(x.view(), 0, kIn), w.view().slice(0, 0, kOut), {},
              head_of(y.view(), 0, kOut), steps);
      add_input_gradient(context_, head_of(ConstTensorView(y), 0, kOut), w.view().slice(0, 0, kOut),
                         head_of(dx.view(), 0, kIn), steps);
      for (std::int64_t head = 0; head < kHeads; ++head) {
        const ConstTensorView weights = w.view().slice(0, head * kOut, (head + 1) * kOut);
        Tensor alone(context_, dtype, {rows, kOut});
        Tensor gradient(context_, DType::kF32, {rows, kIn});
        project(context_, head_of(x.view(), head, kIn), weights, {}, alone);
        add_input_gradient(context_, alone, weights, gradient);
        EXPECT_TRUE(same_bits(alone, head_of(ConstTensorView(y), head, kOut))) << name_of(dtype);
        EXPECT_TRUE(same_bits(gradient, head_of(ConstTensorView(dx), head, kIn))) << name_of(dtype);
      }
    }
  }
}

TEST_P(LargeProjection, ANanReachesItsOwnRowAlone) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const std::int64_t rows : {2, 70, 300}) {
      Tensor x = normal(dtype, {rows, 104}, 1);
      const Tensor w = normal(dtype, {96, 104}, 2);
      Tensor before(context_, dtype, {rows, 96}), after(context_, dtype, {rows, 96});
      project(context_, x, w, {}, before);
      test::set_element(context_, x, 104 + 103, std::nan(""));
      project(context_, x, w, {}, after);
      for (std::int64_t row = 0; row < rows; ++row) {
        const bool same = same_bits(before.view().select(0, row), after.view().select(0, row));
        EXPECT_EQ(same, row != 1) << name_of(dtype) << ", row " << row << " of " << rows;
      }
      for (const double element : test::elements_of(context_, after.view().select(0, 1))) {
        EXPECT_TRUE(std::isnan(element));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(FastestContexts, LargeProjection,
                         testing::ValuesIn(test::fastest_places()), test::place_name);

}  // namespace
}  // namespace ladon
