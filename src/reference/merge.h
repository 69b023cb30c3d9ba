// The merge of partial attention results, row by row: the CPU's own key splits and the public
// merge_attention() both end here.
#pragma once

#include <cstdint>
#include <span>

#include "core/backend.h"
#include "ladon/dtype.h"

namespace ladon::reference {

/// One row of one part: attention over some of the keys.
struct PartialRow {
  const void* out = nullptr;  // value_dim elements
  DType dtype = DType::kF32;
  double lse = 0;  // -inf where the part saw nothing
};

/// out = sum of exp(lse_i - lse) * out_i, summed in order; returns lse = log sum exp(lse_i), the
/// sink (may be null) included. `sums` is space for value_dim doubles.
double merge_rows(std::span<const PartialRow> parts, std::int64_t value_dim, const double* sink,
                  double* sums, void* out, DType out_dtype) noexcept;

void merge(Host& host, const MergeParams& params);

}  // namespace ladon::reference
