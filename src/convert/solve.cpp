#include "convert/solve.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "convert/matrices.h"
#include "layers/projection.h"

namespace ladon::convert {
namespace {

// Columns of a block: what is done inside of blocks, by Eigen on one thread, is a small share of
// the work from 1000 columns on.
constexpr std::int64_t kBlock = 128;

/// Rows [first, last) and columns [left, right).
TensorView part(RealMatrix& matrix, std::int64_t first, std::int64_t last, std::int64_t left,
                std::int64_t right) {
  return view_of(matrix).slice(0, first, last).slice(1, left, right);
}

/// A = L L^T. Below the blocks of the diagonal `a` becomes L; of those blocks the inverses are
/// kept.
std::vector<RealMatrix> factorise(const Context& host, RealMatrix& a) {
  const std::int64_t size = a.rows();
  std::vector<RealMatrix> inverses;
  for (std::int64_t first = 0; first < size; first += kBlock) {
    const std::int64_t last = std::min(first + kBlock, size);
    const std::int64_t width = last - first;
    RealMatrix column = a.block(first, first, size - first, width);
    if (first > 0) {
      RealMatrix product(size - first, width);
      project(host, part(a, first, size, 0, first), part(a, first, last, 0, first), {},
              view_of(product));
      column -= product;
    }
    const ladon_eigen::LLT<RealMatrix> diagonal(column.topRows(width));
    inverses.emplace_back(diagonal.matrixL().solve(RealMatrix::Identity(width, width)));
    a.block(last, first, size - last, width) =
        times_transposed(host, column.bottomRows(size - last), inverses.back());
  }
  return inverses;
}

}  // namespace

RealMatrix solve_symmetric(const Context& host, RealMatrix a, RealMatrix b) {
  const std::int64_t size = a.rows();
  const std::int64_t rows = b.rows();
  const std::vector<RealMatrix> inverses = factorise(host, a);
  const auto count = static_cast<std::int64_t>(inverses.size());
  // Y L^T = B, from the first block of columns on.
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t first = n * kBlock;
    const std::int64_t last = std::min(first + kBlock, size);
    RealMatrix column = b.middleCols(first, last - first);
    if (first > 0) {
      RealMatrix product(rows, last - first);
      project(host, part(b, 0, rows, 0, first), part(a, first, last, 0, first), {},
              view_of(product));
      column -= product;
    }
    b.middleCols(first, last - first) =
        times_transposed(host, column, inverses[static_cast<std::size_t>(n)]);
  }
  // X L = Y, from the last one on.
  for (std::int64_t n = count; n-- > 0;) {
    const std::int64_t first = n * kBlock;
    const std::int64_t last = std::min(first + kBlock, size);
    RealMatrix column = b.middleCols(first, last - first);
    if (last < size) {
      RealMatrix product = RealMatrix::Zero(rows, last - first);
      add_input_gradient(host, part(b, 0, rows, last, size), part(a, last, size, first, last),
                         view_of(product));
      column -= product;
    }
    b.middleCols(first, last - first) = times(host, column, inverses[static_cast<std::size_t>(n)]);
  }
  return b;
}

}  // namespace ladon::convert
