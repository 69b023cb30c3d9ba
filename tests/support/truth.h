// The right answers of a Case, and how far from them an answer may be.
//
// Each sequence is cut out of its batch, converted to double, and given to the reference alone. So
// the handling of batches, padding, packing, strides and dtypes is checked against code that has
// none.
//
// The bound of every element is a sum of absolute values of what was added up to make it, times
// epsilon; see docs/numerics.md.
#pragma once

#include <cstdint>
#include <vector>

#include "ladon/attention.h"
#include "support/case_data.h"

namespace ladon::test {

/// A result and, for each element, the sum of absolute terms behind it (`magnitude`), weighed by
/// how much the scores' own rounding can move it (`sensitivity`).
struct Bounded {
  Tensor value;        // f64
  Tensor magnitude;    // f64
  Tensor sensitivity;  // f64: magnitude * (1 + size of the scores)
};

struct Truth {
  Bounded out, lse, dq, dk, dv, dbias, dsinks;
};

/// Forward and backward. The gradients of dbias and dsinks are there where the case has them.
Truth truth_of(const CaseData& data);

/// How far off `got` is, as a multiple of its bound: at most 1 is right. NaN where NaN is not due,
/// and any difference where the bound is 0, gives infinity.
double worst_ratio(const ConstTensorView& got, const Bounded& expected, DType dtype);

}  // namespace ladon::test
