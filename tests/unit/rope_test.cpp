// rope(): cases worked by hand, and what must hold for any rotation. Each test runs on every
// instruction set that this machine can run, where the reference is one of them, and on the
// pretended device.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "ladon/context.h"
#include "ladon/dtype.h"
#include "ladon/random.h"
#include "ladon/rope.h"
#include "ladon/tensor.h"
#include "support/contexts.h"
#include "support/finite_differences.h"
#include "support/host_context.h"
#include "support/rope_support.h"

namespace ladon {
namespace {

using test::elements_of;

class RopeTest : public test::ContextTest {};
LADON_FOR_EACH_CONTEXT(RopeTest);

// ---- By hand -----------------------------------------------------------------------------------

// Cosine and sine of one and of two radians.
constexpr double kCos1 = 0.5403023058681397;
constexpr double kSin1 = 0.8414709848078965;
constexpr double kCos2 = -0.4161468365471424;
constexpr double kSin2 = 0.9092974268256817;

TEST_P(RopeTest, TwoPairsByHand) {
  // Base 4 and rotary_dim 4: frequencies 1 and 1/2, so position 2 rotates by 2 and 1 radians. The
  // fifth number passes.
  const Tensor x = there(Tensor::from_values(DType::kF64, {1, 1, 1, 5}, {1, 2, 3, 4, 5}));
  const std::vector<double> half_split = {1 * kCos2 - 3 * kSin2, 2 * kCos1 - 4 * kSin1,
                                          1 * kSin2 + 3 * kCos2, 2 * kSin1 + 4 * kCos1, 5};
  const std::vector<double> interleaved = {1 * kCos2 - 2 * kSin2, 1 * kSin2 + 2 * kCos2,
                                           3 * kCos1 - 4 * kSin1, 3 * kSin1 + 4 * kCos1, 5};
  for (const RopeLayout layout : kLayouts) {
    Tensor out(context_, DType::kF64, x.shape());
    rope(context_, x, {.layout = layout, .rotary_dim = 4, .base = 4}, {.first = 2}, out);
    const auto& expected = layout == RopeLayout::kHalfSplit ? half_split : interleaved;
    const std::vector<double> got = elements_of(out);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 4e-15);
  }
}

TEST_P(RopeTest, ExplicitFrequenciesByHand) {
  // Out of order, one of them 0 and one negative; position 2 rotates by 1, 0 and -2 radians.
  const Tensor x = there(Tensor::from_values(DType::kF64, {1, 1, 1, 7}, {1, 2, 3, 4, 5, 6, 7}));
  const RopeOptions options{.layout = RopeLayout::kInterleaved,
                            .rotary_dim = 6,
                            .frequencies = {0.5, 0, -1},
                            .magnitude = 3};
  const std::vector<double> expected = {
      3 * (1 * kCos1 - 2 * kSin1), 3 * (1 * kSin1 + 2 * kCos1),  9, 12,
      3 * (5 * kCos2 + 6 * kSin2), 3 * (-5 * kSin2 + 6 * kCos2), 7};
  Tensor out(context_, DType::kF64, x.shape());
  rope(context_, x, options, {.first = 2}, out);
  const std::vector<double> got = elements_of(out);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 2e-14);
}

TEST_P(RopeTest, ExplicitFrequenciesOfAScalingGiveItsBits) {
  const RopeOptions by_scaling{
      .base = 5000, .scaling = {.kind = RopeScaling::kYarn, .factor = 8, .original_context = 64}};
  const RopeOptions explicitly{.frequencies = rope_frequencies(by_scaling, 10),
                               .magnitude = rope_magnitude(by_scaling)};
  EXPECT_EQ(rope_frequencies(explicitly, 10), explicitly.frequencies);
  EXPECT_EQ(rope_magnitude(explicitly), explicitly.magnitude);
  EXPECT_NE(explicitly.magnitude, 1);
  Tensor x(DType::kF32, {2, 5, 3, 10});
  fill_normal(test::host_context(), x, 0, 1, 7);
  const Tensor here = there(x.clone());
  Tensor expected(context_, DType::kF32, x.shape());
  Tensor got(context_, DType::kF32, x.shape());
  rope(context_, here, by_scaling, {.first = 100}, expected);
  rope(context_, here, explicitly, {.first = 100}, got);
  EXPECT_EQ(elements_of(got), elements_of(expected));
  rope_backward(context_, here, by_scaling, {.first = 100}, expected);
  rope_backward(context_, here, explicitly, {.first = 100}, got);
  EXPECT_EQ(elements_of(got), elements_of(expected));
}

TEST_P(RopeTest, QuarterTurnsByTableAreExact) {
  // Row 0 stays, row 1 is a quarter turn: (a, b) -> (-b, a); backward (a, b) -> (b, -a).
  const Tensor cos = there(Tensor::from_values(DType::kBF16, {2, 2}, {1, 1, 0, 0}));
  const Tensor sin = there(Tensor::from_values(DType::kF32, {2, 2}, {0, 0, 1, 1}));
  const RopeTable table{cos, sin};
  const std::vector<std::int64_t> positions = {1, 0};
  for (const DType dtype : kFloatTypes) {
    const Tensor x = there(Tensor::from_values(dtype, {1, 2, 1, 4}, {1, 2, 3, 4, 5, 6, 7, 8}));
    Tensor out(context_, dtype, x.shape());
    rope(context_, x, {}, table, {.explicit_positions = positions}, out);
    EXPECT_EQ(elements_of(out), (std::vector<double>{-3, -4, 1, 2, 5, 6, 7, 8}));
    rope_backward(context_, x, {}, table, {.explicit_positions = positions}, out);
    EXPECT_EQ(elements_of(out), (std::vector<double>{3, 4, -1, -2, 5, 6, 7, 8}));
    const RopeOptions interleaved{.layout = RopeLayout::kInterleaved};
    rope(context_, x, interleaved, table, {.explicit_positions = positions}, out);
    EXPECT_EQ(elements_of(out), (std::vector<double>{-2, 1, -4, 3, 5, 6, 7, 8}));
    rope_backward(context_, x, interleaved, table, {.explicit_positions = positions}, out);
    EXPECT_EQ(elements_of(out), (std::vector<double>{2, -1, 4, -3, 5, 6, 7, 8}));
  }
}

TEST_P(RopeTest, PositionsAreTakenAsGiven) {
  // One pair (1, 0) with frequency 1 becomes (cos p, sin p): the output tells the position.
  const Tensor x = there(Tensor::from_values(DType::kF64, {2, 2, 1, 2}, {1, 0, 1, 0, 1, 0, 1, 0}));
  const std::vector<std::int64_t> shared = {3, -1};
  const std::vector<std::int64_t> separate = {3, -1, 0, 2};
  const auto expect = [&](const RopePositions& positions, const std::vector<double>& expected) {
    Tensor out(context_, DType::kF64, x.shape());
    rope(context_, x, {}, positions, out);
    const std::vector<double> got = elements_of(out);
    for (std::size_t i = 0; i < expected.size(); ++i) {
      EXPECT_NEAR(got[2 * i], std::cos(expected[i]), 1e-15);
      EXPECT_NEAR(got[2 * i + 1], std::sin(expected[i]), 1e-15);
    }
  };
  expect({}, {0, 1, 0, 1});
  expect({.first = -1}, {-1, 0, -1, 0});
  expect({.explicit_positions = shared}, {3, -1, 3, -1});
  expect({.explicit_positions = separate}, {3, -1, 0, 2});
}

TEST_P(RopeTest, FarPositionsKeepTheirAngles) {
  // The angles of a float product would be off by 0.03 here.
  constexpr std::int64_t kPosition = 1'000'003;
  constexpr std::int64_t kHeadDim = 16;
  std::vector<double> ones(kHeadDim, 0.0);
  for (std::size_t i = 0; i < ones.size(); i += 2) ones[i] = 1;
  const Tensor x = there(Tensor::from_values(DType::kF32, {1, 1, 1, kHeadDim}, ones));
  Tensor out(context_, DType::kF32, x.shape());
  rope(context_, x, {.layout = RopeLayout::kInterleaved}, {.first = kPosition}, out);
  const std::vector<double> got = elements_of(out);
  for (std::size_t n = 0; n < kHeadDim / 2; ++n) {
    const long double angle =
        kPosition * std::pow(10000.0L, -2.0L * static_cast<long double>(n) / kHeadDim);
    EXPECT_NEAR(got[2 * n], static_cast<double>(std::cos(angle)), 6e-8);
    EXPECT_NEAR(got[2 * n + 1], static_cast<double>(std::sin(angle)), 6e-8);
  }
}

TEST_P(RopeTest, EmptyIsLegal) {
  for (const Dims& shape : {Dims{0, 2, 3, 4}, Dims{2, 0, 3, 4}, Dims{2, 2, 0, 4}}) {
    const TensorView nothing(nullptr, DType::kF32, shape, context_.device());
    rope(context_, nothing, {}, {}, nothing);
    rope_backward(context_, nothing, {}, {}, nothing);
    Tensor cos(context_, DType::kF32, {2, 2});
    Tensor sin(context_, DType::kF32, {2, 2});
    rope(context_, nothing, {}, RopeTable{cos, sin}, {}, nothing);
  }
}

// ---- What any rotation keeps -------------------------------------------------------------------

double dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

TEST_P(RopeTest, PositionZeroIsTheIdentity) {
  for (const DType dtype : kFloatTypes) {
    for (const RopeLayout layout : kLayouts) {
      const Tensor x = normal(dtype, {2, 1, 3, 34}, 1);
      Tensor out(context_, dtype, x.shape());
      rope(context_, x, {.layout = layout}, {}, out);
      EXPECT_EQ(elements_of(out), elements_of(x));
      rope_backward(context_, x, {.layout = layout}, {}, out);
      EXPECT_EQ(elements_of(out), elements_of(x));
    }
  }
}

TEST_P(RopeTest, NormsAreKeptButForTheMagnitude) {
  for (const double magnitude : {1.0, 1.75}) {
    for (const RopeLayout layout : kLayouts) {
      const RopeOptions options{
          .layout = layout,
          .scaling = {.kind = RopeScaling::kYarn, .factor = 3, .attention_factor = magnitude}};
      const Tensor x = normal(DType::kF64, {1, 1, 1, 130}, 2);
      Tensor out(context_, DType::kF64, x.shape());
      rope(context_, x, options, {.first = 12345}, out);
      const double norm = std::sqrt(dot(elements_of(x), elements_of(x)));
      EXPECT_NEAR(std::sqrt(dot(elements_of(out), elements_of(out))), magnitude * norm,
                  1e-13 * norm);
    }
  }
}

TEST_P(RopeTest, ScoresDependOnTheDistanceAlone) {
  const Tensor q = normal(DType::kF64, {1, 1, 1, 64}, 3);
  const Tensor k = normal(DType::kF64, {1, 1, 1, 64}, 4);
  for (const RopeLayout layout : kLayouts) {
    const auto score = [&](std::int64_t query_position, std::int64_t key_position) {
      Tensor rotated_q(context_, DType::kF64, q.shape());
      Tensor rotated_k(context_, DType::kF64, k.shape());
      rope(context_, q, {.layout = layout}, {.first = query_position}, rotated_q);
      rope(context_, k, {.layout = layout}, {.first = key_position}, rotated_k);
      return dot(elements_of(rotated_q), elements_of(rotated_k));
    };
    const double expected = score(17, 5);
    EXPECT_NEAR(score(12, 0), expected, 1e-12);
    EXPECT_NEAR(score(0, -12), expected, 1e-12);
    EXPECT_NEAR(score(40017, 40005), expected, 1e-9);
    EXPECT_GT(std::abs(score(18, 5) - expected), 1e-3);
  }
}

TEST_P(RopeTest, BackwardIsTheTranspose) {
  const RopeOptions options{
      .layout = RopeLayout::kInterleaved,
      .rotary_dim = 6,
      .scaling = {.kind = RopeScaling::kYarn, .factor = 3, .original_context = 100}};
  const RopePositions positions{.first = 7};
  const Tensor y = normal(DType::kF64, {2, 3, 2, 9}, 5);
  Tensor x = normal(DType::kF64, y.shape(), 6);
  Tensor dx(context_, DType::kF64, y.shape());
  rope_backward(context_, y, options, positions, dx);
  const auto product = [&] {
    Tensor out(context_, DType::kF64, y.shape());
    rope(context_, x, options, positions, out);
    return dot(elements_of(out), elements_of(y));
  };
  EXPECT_NEAR(product(), dot(elements_of(x), elements_of(dx)), 1e-12);
  // rope() is linear: finite differences are exact with any step, and 1 loses no digits.
  const std::vector<double> slopes = test::slopes_of(context_, x, product, 1);
  const std::vector<double> got = elements_of(dx);
  for (std::size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(slopes[i], got[i], 1e-13);
}

TEST_P(RopeTest, BackwardUndoesATurnWithoutMagnitude) {
  const Tensor x = normal(DType::kF64, {1, 5, 2, 32}, 7);
  Tensor rotated = Tensor::copy_of(context_, x);
  rope(context_, rotated, {}, {.first = 100}, rotated);
  rope_backward(context_, rotated, {}, {.first = 100}, rotated);
  const std::vector<double> expected = elements_of(x);
  const std::vector<double> got = elements_of(rotated);
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-14);
}

TEST_P(RopeTest, MadeTableGivesTheSameAsTheOptions) {
  for (const RopeLayout layout : kLayouts) {
    const RopeOptions options{
        .layout = layout,
        .scaling = {.kind = RopeScaling::kYarn, .factor = 8, .original_context = 64}};
    const Tensor x = normal(DType::kF64, {2, 5, 3, 16}, 8);
    Tensor cos(context_, DType::kF64, {12, 8});
    Tensor sin(context_, DType::kF64, {12, 8});
    make_rope_table(context_, options, 16, cos, sin);
    Tensor from_options(context_, DType::kF64, x.shape());
    Tensor from_table(context_, DType::kF64, x.shape());
    rope(context_, x, options, {.first = 7}, from_options);
    rope(context_, x, {.layout = layout}, RopeTable{cos, sin}, {.first = 7}, from_table);
    const std::vector<double> expected = elements_of(from_options);
    const std::vector<double> got = elements_of(from_table);
    for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(got[i], expected[i], 1e-14);
  }
}

TEST_P(RopeTest, BitsDependOnNeitherThreadsNorBatchMates) {
  // 201 tokens of 1024 elements: seven tasks.
  for (const DType dtype : kFloatTypes) {
    const Tensor x = normal(dtype, {3, 67, 16, 64}, 9);
    Tensor expected(context_, dtype, x.shape());
    context_.synchronize();
    const Context one = GetParam().context(1);
    rope(one, x, {}, {.first = 5}, expected);
    one.synchronize();
    for (const int threads : {2, 3, 7}) {
      const Context context = GetParam().context(threads);
      Tensor out(context, dtype, x.shape());
      rope(context, x, {}, {.first = 5}, out);
      context.synchronize();
      EXPECT_TRUE(same_bits(out, expected)) << name_of(dtype) << ", " << threads << " threads";
    }
    // One token alone.
    const ConstTensorView token = x.view().slice(0, 2, 3).slice(1, 31, 32);
    Tensor alone(context_, dtype, token.shape());
    rope(context_, token, {}, {.first = 5 + 31}, alone);
    const Tensor in_company =
        Tensor::copy_of(context_, ConstTensorView(expected).slice(0, 2, 3).slice(1, 31, 32));
    EXPECT_TRUE(same_bits(alone, in_company)) << name_of(dtype);
  }
}

TEST_P(RopeTest, NaNStaysInItsPair) {
  for (const DType dtype : kFloatTypes) {
    for (const bool in_place : {false, true}) {
      // Two tokens of two heads. In head 0 of token 0, the second number of pair 3 and a passed
      // one; in head 1 of token 1, all that passes.
      std::vector<double> values(2 * 2 * 45, 1.0);
      values[3 + 20] = kNaN;
      values[42] = kNaN;
      for (std::size_t d = 40; d < 45; ++d) values[3 * 45 + d] = kNaN;
      Tensor x = there(Tensor::from_values(dtype, {1, 2, 2, 45}, values));
      Tensor separate(context_, dtype, x.shape());
      Tensor& out = in_place ? x : separate;
      rope(context_, x, {.rotary_dim = 40}, {.first = 3}, out);
      std::vector<bool> expected(values.size(), false);
      for (std::size_t i = 0; i < values.size(); ++i) expected[i] = std::isnan(values[i]);
      expected[3] = true;  // the other number of the pair
      const std::vector<double> got = elements_of(out);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(std::isnan(got[i]), expected[i]) << name_of(dtype) << " element " << i;
      }
    }
  }
}

}  // namespace
}  // namespace ladon
