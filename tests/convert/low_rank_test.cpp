// The linear algebra of conversions, against theorems.
#include "convert/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "convert/convert_support.h"
#include "convert/matrices.h"
#include "convert/rope_pairs.h"

namespace ladon::convert {
namespace {

RealMatrix random_matrix(std::int64_t rows, std::int64_t columns, std::uint64_t seed) {
  return to_matrix(test::host_context(), test::random_tensor({rows, columns}, seed));
}

/// E |e|^2 in the metric, of the errors of an approximation of M x.
double expected_error(const RealMatrix& m, const RealMatrix& approximation,
                      const RealMatrix& inputs, const RealMatrix& metric) {
  const RealMatrix difference = m - approximation;
  return (metric * difference * inputs * difference.transpose()).trace();
}

TEST(LowRank, IsOptimalAndSaysWhatItDiscards) {
  const RealMatrix m = random_matrix(12, 9, 1);
  const RealMatrix half = random_matrix(9, 9, 2);
  const RealMatrix inputs = half * half.transpose();
  const RealMatrix factor = random_matrix(12, 12, 3);
  for (const bool weighted : {false, true}) {
    const RealMatrix metric =
        weighted ? RealMatrix(factor * factor.transpose()) : RealMatrix::Identity(12, 12);
    const RealMatrix moments = second_moment(test::host_context(), m, inputs);
    for (const std::int64_t rank : {1, 4, 8}) {
      const LowRank low = low_rank(moments, weighted ? metric : RealMatrix(), rank);
      const double error = expected_error(m, low.up * low.down * m, inputs, metric);
      EXPECT_NEAR(error, low.discarded(), 1e-9 * low.energies.sum());
      for (std::int64_t n = 1; n < low.energies.size(); ++n) {
        EXPECT_LE(low.energies(n), low.energies(n - 1));
      }
      // No other projection of that rank is better: those without knowledge of the inputs, and
      // random ones.
      const LowRank blind = low_rank(second_moment(test::host_context(), m, {}), {}, rank);
      EXPECT_LE(error, expected_error(m, blind.up * blind.down * m, inputs, metric));
      for (std::uint64_t seed = 10; seed < 110; ++seed) {
        const RealMatrix up = random_matrix(12, rank, seed);
        const RealMatrix projection =
            up * (up.transpose() * metric * up).inverse() * up.transpose() * metric;
        EXPECT_LE(error, expected_error(m, projection * m, inputs, metric));
      }
    }
    // The mean of two heads of 6 rows is a projection too.
    RealMatrix mean = RealMatrix::Zero(12, 12);
    for (int row = 0; row < 12; ++row) mean(row, row % 6) = mean(row, row % 6 + 6) = 0.5;
    const LowRank half_rank = low_rank(moments, weighted ? metric : RealMatrix(), 6);
    EXPECT_LE(expected_error(m, half_rank.up * half_rank.down * m, inputs, metric),
              expected_error(m, mean * m, inputs, metric));
    const LowRank full = low_rank(moments, weighted ? metric : RealMatrix(), 9);
    EXPECT_LT(relative_residual(m, full.up * full.down * m), 1e-10);
  }
}

TEST(PrincipalComponents, AreUnitaryWithAFixedPhase) {
  const RealMatrix keys = random_matrix(12, 5, 4);  // three heads of four rows
  const RealMatrix moments = second_moment(test::host_context(), keys, {});
  const HeadLayout layout(RopeOptions{}, 4);
  const ComplexMatrix pair = pair_moments(moments, layout, 1, {0, 1, 2});
  EXPECT_LT((pair - pair.adjoint()).norm(), 1e-12);
  const ComplexComponents components = principal_components(pair);
  const ComplexMatrix identity = components.vectors.adjoint() * components.vectors;
  EXPECT_LT((identity - ComplexMatrix::Identity(3, 3)).norm(), 1e-12);
  const ComplexMatrix rebuilt =
      components.vectors * components.energies.asDiagonal() * components.vectors.adjoint();
  EXPECT_LT((rebuilt - pair).norm(), 1e-12);
  for (int column = 0; column < 3; ++column) {
    ladon_eigen::Index largest = 0;
    components.vectors.col(column).cwiseAbs2().maxCoeff(&largest);
    EXPECT_GT(components.vectors(largest, column).real(), 0);
    EXPECT_NEAR(components.vectors(largest, column).imag(), 0, 1e-15);
  }
}

TEST(RopePairs, CommuteWithRope) {
  // A pair of the keys times any complex number, the queries' times its inverse's conjugate: scores
  // of all positions stay.
  for (const RopeLayout order : {RopeLayout::kHalfSplit, RopeLayout::kInterleaved}) {
    const RopeOptions rope_options{.layout = order};
    const HeadLayout layout(rope_options, 6);
    const RealMatrix before_key = random_matrix(6, 1, 5);
    const RealMatrix before_query = random_matrix(6, 1, 6);
    RealMatrix key = before_key;
    RealMatrix query = before_query;
    for (std::size_t n = 0; n < layout.pairs.size(); ++n) {
      const Complex factor = std::polar(0.5 + static_cast<double>(n), 1.7);
      multiply_pair(key, layout.pairs[n], factor);
      multiply_pair(query, layout.pairs[n], 1.0 / std::conj(factor));
    }
    const auto score = [&](RealMatrix q, RealMatrix k, std::int64_t q_at, std::int64_t k_at) {
      const TensorView rows[] = {{q.data(), DType::kF64, {1, 1, 1, 6}},
                                 {k.data(), DType::kF64, {1, 1, 1, 6}}};
      rope(test::host_context(), rows[0], rope_options, {.first = q_at}, rows[0]);
      rope(test::host_context(), rows[1], rope_options, {.first = k_at}, rows[1]);
      return q.col(0).dot(k.col(0));
    };
    for (const std::int64_t at : {0, 3, 50}) {
      EXPECT_NEAR(score(query, key, 60, at), score(before_query, before_key, 60, at), 1e-12);
    }
  }
}

TEST(MeanPhase, ByHand) {
  EXPECT_EQ(mean_phase(0, 100, true), Complex(1, 0));
  EXPECT_EQ(mean_phase(3, 1, true), Complex(1, 0));
  // Two positions: distances 0, 0 and 1; without a mask -1 too.
  const double pi = std::numbers::pi;
  EXPECT_LT(std::abs(mean_phase(pi / 2, 2, true) - Complex(2.0 / 3, -1.0 / 3)), 1e-15);
  EXPECT_LT(std::abs(mean_phase(pi, 2, false) - Complex(0, 0)), 1e-15);
  EXPECT_LT(std::abs(mean_phase(1, 100000, true)), 1e-4);
}

}  // namespace
}  // namespace ladon::convert
