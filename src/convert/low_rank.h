// The best approximation of M x by an up-projection of lower rank, where x has second moments C
// and errors are weighted: of M C M^T and a metric, its principal components.
#pragma once

#include <cstdint>

#include "convert/eigen.h"
#include "ladon/context.h"
#include "ladon/convert.h"

namespace ladon::convert {

/// M x is approximated by up (down M) x.
struct LowRank {
  RealMatrix down;      // [rank, rows of M]
  RealMatrix up;        // [rows of M, rank]
  RealVector energies;  // of all components in the metric, falling, not negative
  /// Energy of the components past the rank.
  double discarded() const;
  /// Sets `discarded` and `spectrum`, as shares of the whole.
  void describe(ConversionSummary& summary) const;
};

/// moments = M C M^T. `metric` is a positive definite G, errors e count as e^T G e; empty: the
/// identity.
LowRank low_rank(const Context& host, const RealMatrix& moments, const RealMatrix& metric,
                 std::int64_t rank);

/// The sum of all but the `rank` largest eigenvalues of a symmetric or Hermitian matrix.
double discarded_energy(const RealMatrix& moments, std::int64_t rank);
double discarded_energy(const ComplexMatrix& moments, std::int64_t rank);

/// Orthonormal columns that span those of `a`: as many as its numerical rank, and at least one.
RealMatrix column_space(const RealMatrix& a);

/// Keeps metrics definite where queries or outputs ignore some direction.
constexpr double kMetricRidge = 1e-6;

/// Adds a share of the mean of the diagonal to it, so that the matrix can be inverted; the identity
/// where that mean is 0.
void add_ridge(ladon_eigen::Ref<RealMatrix> matrix, double share);

/// The principal components of Hermitian moments, in the columns of `vectors`, with falling
/// energies. The phase of a component is fixed: its largest element is real and positive.
struct ComplexComponents {
  ComplexMatrix vectors;
  RealVector energies;
};
ComplexComponents principal_components(const ComplexMatrix& moments);

/// |a - up down a| / |a|: what is left out of the weights themselves. 0 where a is 0.
double relative_residual(const RealMatrix& a, const RealMatrix& approximation);

}  // namespace ladon::convert
