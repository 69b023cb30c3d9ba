// Linear systems of the size of a layer.
#pragma once

#include "convert/eigen.h"
#include "ladon/context.h"

namespace ladon::convert {

/// X with X A = B, for a symmetric positive definite A, by Cholesky's factorisation in blocks: all
/// large products run in the library's kernels, with an order of sums that does not depend on
/// threads.
RealMatrix solve_symmetric(const Context& host, RealMatrix a, RealMatrix b);

}  // namespace ladon::convert
