// Eigen, for src/convert alone, and the matrices that it works with.
//
// Its namespace is renamed: a program that links the static library may use Eigen itself, compiled
// for another instruction set, and the linker would otherwise take one copy of each inline function
// for both. One thread: results must not depend on how many there are.
#pragma once

#define Eigen ladon_eigen
#define EIGEN_DONT_PARALLELIZE
#define EIGEN_MPL2_ONLY
#include <Eigen/Cholesky>
#include <Eigen/Core>
#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#undef Eigen

#include <complex>

namespace ladon::convert {

using Complex = std::complex<double>;
using RealMatrix =
    ladon_eigen::Matrix<double, ladon_eigen::Dynamic, ladon_eigen::Dynamic, ladon_eigen::RowMajor>;
using ComplexMatrix = ladon_eigen::Matrix<Complex, ladon_eigen::Dynamic, ladon_eigen::Dynamic>;
using RealVector = ladon_eigen::VectorXd;

}  // namespace ladon::convert
