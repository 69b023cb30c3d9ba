// What a rank has of a dimension: heads, rows of a weight, elements of a sum.
#pragma once

#include <cstdint>

#include "ladon/tensor_view.h"

namespace ladon {

/// Elements [begin, end).
struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t length() const { return end - begin; }
};

/// The part of `count` elements that a rank has: as even as their number allows.
inline Range share_of(std::int64_t count, std::int64_t rank, std::int64_t ranks) {
  return {count * rank / ranks, count * (rank + 1) / ranks};
}

/// Elements of a dimension of a mask or bias; one that is 1 long serves all of them.
inline ConstTensorView slice_unless_one(const ConstTensorView& view, int dim, const Range& range) {
  return view.absent() || view.size(dim) == 1 ? view : view.slice(dim, range.begin, range.end);
}

}  // namespace ladon
