#include "convert/low_rank.h"

#include <algorithm>
#include <cmath>

#include "convert/matrices.h"

namespace ladon::convert {
namespace {

using ladon_eigen::Index;

/// The sign of an eigenvector is arbitrary: the largest element is made positive, the first where
/// several are equal.
void fix_signs(RealMatrix& vectors) {
  for (Index column = 0; column < vectors.cols(); ++column) {
    Index largest = 0;
    vectors.col(column).cwiseAbs().maxCoeff(&largest);
    if (vectors(largest, column) < 0) vectors.col(column) = -vectors.col(column).eval();
  }
}

template <class Matrix>
double sum_of_discarded(const Matrix& moments, std::int64_t rank) {
  if (moments.rows() <= rank) return 0;
  const ladon_eigen::SelfAdjointEigenSolver<Matrix> solver(moments, ladon_eigen::EigenvaluesOnly);
  return solver.eigenvalues().head(moments.rows() - rank).cwiseMax(0.0).sum();
}

}  // namespace

double LowRank::discarded() const { return energies.tail(energies.size() - up.cols()).sum(); }

void LowRank::describe(ConversionSummary& summary) const {
  const double total = energies.sum();
  summary.discarded = total > 0 ? discarded() / total : 0;
  for (const double energy : energies) summary.spectrum.push_back(total > 0 ? energy / total : 0);
}

LowRank low_rank(const Context& host, const RealMatrix& moments, const RealMatrix& metric,
                 std::int64_t rank) {
  const bool weighted = metric.size() != 0;
  RealMatrix factor;  // G = L L^T
  RealMatrix target = moments;
  if (weighted) {
    factor = ladon_eigen::LLT<RealMatrix>(metric).matrixL();
    target = times(host, times(host, factor.transpose(), moments), factor);
    target = (0.5 * (target + target.transpose())).eval();
  }
  const ladon_eigen::SelfAdjointEigenSolver<RealMatrix> solver(target);
  RealMatrix vectors = solver.eigenvectors().rightCols(rank).rowwise().reverse();
  fix_signs(vectors);
  LowRank result;
  result.energies = solver.eigenvalues().reverse().cwiseMax(0.0);
  if (weighted) {
    result.down = times_transposed(host, vectors.transpose(), factor);
    result.up =
        factor.transpose().template triangularView<ladon_eigen::Upper>().solve(vectors).eval();
  } else {
    result.down = vectors.transpose();
    result.up = vectors;
  }
  return result;
}

double discarded_energy(const RealMatrix& moments, std::int64_t rank) {
  return sum_of_discarded(moments, rank);
}
double discarded_energy(const ComplexMatrix& moments, std::int64_t rank) {
  return sum_of_discarded(moments, rank);
}

RealMatrix column_space(const RealMatrix& a) {
  const ladon_eigen::ColPivHouseholderQR<RealMatrix> qr(a);
  return qr.householderQ() * RealMatrix::Identity(a.rows(), std::max<std::int64_t>(1, qr.rank()));
}

void add_ridge(ladon_eigen::Ref<RealMatrix> matrix, double share) {
  if (matrix.rows() == 0) return;
  const double mean = matrix.diagonal().mean();
  matrix.diagonal().array() += mean > 0 ? share * mean : 1.0;
}

ComplexComponents principal_components(const ComplexMatrix& moments) {
  const ladon_eigen::SelfAdjointEigenSolver<ComplexMatrix> solver(moments);
  ComplexComponents result{solver.eigenvectors().rowwise().reverse(),
                           solver.eigenvalues().reverse().cwiseMax(0.0)};
  for (Index column = 0; column < result.vectors.cols(); ++column) {
    Index largest = 0;
    result.vectors.col(column).cwiseAbs2().maxCoeff(&largest);
    const Complex element = result.vectors(largest, column);
    result.vectors.col(column) *= std::conj(element) / std::abs(element);
  }
  return result;
}

double relative_residual(const RealMatrix& a, const RealMatrix& approximation) {
  const double norm = a.norm();
  return norm == 0 ? approximation.norm() : (a - approximation).norm() / norm;
}

}  // namespace ladon::convert
