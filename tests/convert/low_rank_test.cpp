// The linear algebra of conversions, against theorems.
#include "convert/low_rank.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "convert/convert_support.h"
#include "convert/matrices.h"
#include "convert/rope_pairs.h"
#include "convert/solve.h"

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
      const LowRank low =
          low_rank(test::host_context(), moments, weighted ? metric : RealMatrix(), rank);
      const double error = expected_error(m, low.up * low.down * m, inputs, metric);
      EXPECT_NEAR(error, low.discarded(), 1e-9 * low.energies.sum());
      for (std::int64_t n = 1; n < low.energies.size(); ++n) {
        EXPECT_LE(low.energies(n), low.energies(n - 1));
      }
      // No other projection of that rank is better: those without knowledge of the inputs, and
      // random ones.
      const LowRank blind =
          low_rank(test::host_context(), second_moment(test::host_context(), m, {}), {}, rank);
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
    const LowRank half_rank =
        low_rank(test::host_context(), moments, weighted ? metric : RealMatrix(), 6);
    EXPECT_LE(expected_error(m, half_rank.up * half_rank.down * m, inputs, metric),
              expected_error(m, mean * m, inputs, metric));
    const LowRank full =
        low_rank(test::host_context(), moments, weighted ? metric : RealMatrix(), 9);
    EXPECT_LT(relative_residual(m, full.up * full.down * m), 1e-10);
  }
}

TEST(SolveSymmetric, SolvesInBlocks) {
  for (const std::int64_t size : {1, 127, 128, 129, 300}) {
    const RealMatrix half = random_matrix(size, size, 4);
    const RealMatrix a = half * half.transpose() +
                         0.1 * static_cast<double>(size) * RealMatrix::Identity(size, size);
    const RealMatrix b = random_matrix(5, size, 5);
    const RealMatrix x = solve_symmetric(test::host_context(), a, b);
    EXPECT_LT((x * a - b).norm(), 1e-12 * b.norm()) << size;
    EXPECT_TRUE(x == solve_symmetric(Context({.num_threads = 3}), a, b)) << size;
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
  // What one component leaves of the three heads is the energy of the others; no other does better,
  // the mean of the heads included.
  const double left = components.energies.tail(2).sum();
  const auto left_by = [&](const ComplexMatrix& unit) {
    return pair.trace().real() - (unit.adjoint() * pair * unit)(0, 0).real();
  };
  EXPECT_NEAR(left_by(components.vectors.leftCols(1)), left, 1e-12);
  EXPECT_GT(left_by(ComplexMatrix::Constant(3, 1, 1 / std::sqrt(3.0))), left);
  for (std::uint64_t seed = 20; seed < 120; ++seed) {
    const RealMatrix numbers = random_matrix(3, 2, seed);
    ComplexMatrix unit(3, 1);
    for (int head = 0; head < 3; ++head) unit(head, 0) = {numbers(head, 0), numbers(head, 1)};
    EXPECT_GE(left_by(unit / unit.norm()), left);
  }
}

/// The score of a query and a key, columns of one head, at their positions.
double roped_score(const RopeOptions& options, RealMatrix query, RealMatrix key,
                   std::int64_t query_at, std::int64_t key_at) {
  const TensorView rows[] = {{query.data(), DType::kF64, {1, 1, 1, query.rows()}},
                             {key.data(), DType::kF64, {1, 1, 1, key.rows()}}};
  rope(test::host_context(), rows[0], options, {.first = query_at}, rows[0]);
  rope(test::host_context(), rows[1], options, {.first = key_at}, rows[1]);
  return query.col(0).dot(key.col(0));
}

TEST(RopePairs, UnitaryMixturesOfHeadsKeepScores) {
  // For each pair, the keys of three heads become as many components that all heads share.
  for (const RopeLayout order : {RopeLayout::kHalfSplit, RopeLayout::kInterleaved}) {
    const RopeOptions rope_options{.layout = order};
    const HeadLayout layout(rope_options, 6);
    const RealMatrix keys = random_matrix(6, 3, 7);  // a column for each head
    const RealMatrix query = random_matrix(6, 1, 8);
    constexpr int kHead = 1;  // the query's
    RealMatrix components = RealMatrix::Zero(6, 3);
    RealMatrix queries = query.replicate(1, 3);
    for (std::size_t n = 0; n < layout.pairs.size(); ++n) {
      ComplexMatrix random(3, 3);
      random.real() = random_matrix(3, 3, 10 + n);
      random.imag() = random_matrix(3, 3, 20 + n);
      const ComplexMatrix unitary =
          ladon_eigen::HouseholderQR<ComplexMatrix>(random).householderQ();
      const HeadLayout::Pair pair = layout.pairs[n];
      for (int j = 0; j < 3; ++j) {
        for (int head = 0; head < 3; ++head) {
          const Complex z =
              std::conj(unitary(head, j)) * Complex(keys(pair.a, head), keys(pair.b, head));
          components(pair.a, j) += z.real();
          components(pair.b, j) += z.imag();
        }
        RealMatrix one = queries.col(j);
        multiply_pair(one, pair, std::conj(unitary(kHead, j)));
        queries.col(j) = one;
      }
    }
    for (const std::int64_t at : {0, 3, 50}) {
      double sum = 0;
      for (int j = 0; j < 3; ++j) {
        sum += roped_score(rope_options, queries.col(j), components.col(j), 60, at);
      }
      EXPECT_NEAR(sum, roped_score(rope_options, query, keys.col(kHead), 60, at), 1e-12);
    }
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
    for (const std::int64_t at : {0, 3, 50}) {
      EXPECT_NEAR(roped_score(rope_options, query, key, 60, at),
                  roped_score(rope_options, before_query, before_key, 60, at), 1e-12);
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
