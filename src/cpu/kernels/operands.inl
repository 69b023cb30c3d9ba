// The operands of every product: strided rows, sizes, and where results go.
//
// These structs are passed by value. Behind a reference their fields would be loaded again after
// every store of a vector, because such a store may alias anything.
#pragma once

#include <cstdint>

namespace ladon::cpu {
namespace {

/// Rows of contiguous elements, `stride` elements apart.
template <class Element>
struct RowBlock {
  Element* data = nullptr;
  std::int64_t stride = 0;

  Element* at(std::int64_t row, std::int64_t column) const {
    return data + (row * stride + column);
  }
  Element* row(std::int64_t i) const { return data + i * stride; }
  /// The block that begins at (row, column).
  RowBlock from(std::int64_t row, std::int64_t column) const { return {at(row, column), stride}; }
};

/// How many of the rows that are left form the next register block, of at most `most` rows. The
/// last two blocks are of similar size: a single row would leave FMAs waiting for each other.
inline std::int64_t register_rows(std::int64_t left, std::int64_t most) {
  if (left > 2 * most) return most;
  return left > most ? (left + 1) / 2 : left;
}

/// The sizes of a product C[rows][width] whose elements are sums of `depth` terms.
struct ProductSize {
  std::int64_t rows = 0;
  std::int64_t width = 0;
  std::int64_t depth = 0;
};

/// Where a product is stored: rows `stride` elements apart, overwritten or accumulated into.
template <class Scalar>
struct ProductTarget {
  Scalar* data = nullptr;
  std::int64_t stride = 0;
  bool accumulate = false;

  Scalar* at(std::int64_t row, std::int64_t column) const { return data + (row * stride + column); }
  /// The target that begins at (row, column).
  ProductTarget from(std::int64_t row, std::int64_t column) const {
    return {at(row, column), stride, accumulate};
  }
};

/// The factors and the results of products whose sums are vectors of type V.
template <class V>
using FactorRows = RowBlock<const typename V::Factor>;
template <class V>
using SumTarget = ProductTarget<typename V::Scalar>;

}  // namespace
}  // namespace ladon::cpu
