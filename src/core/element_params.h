// Small operations on elements, as every backend sees them: plain data.
#pragma once

#include <cstdint>
#include <span>

#include "core/attention_params.h"
#include "core/sum_params.h"

namespace ladon {

/// What clip_gradients() needs to know of all elements of some arrays.
struct Magnitude {
  double sum_of_squares = 0;  // of elements * 2^-exponent
  double largest = 0;         // absolute; NaN is passed over
};

/// Rows of partial attention results that are merged by their lse.
struct MergePart {
  const void* out = nullptr;  // [batch, token, head, dim]
  DType out_dtype = DType::kF32;
  std::int64_t out_strides[3] = {};
  const void* lse = nullptr;  // [batch, head, token], f32 or f64
  DType lse_dtype = DType::kF32;
  std::int64_t lse_strides[3] = {};
};

struct MergeParams {
  std::int64_t batch = 0;
  std::int64_t query_len = 0;
  std::int64_t num_heads = 0;
  std::int64_t value_dim = 0;
  std::span<const MergePart> parts{};  // host memory
  MergePart result{};                  // written; lse may be null
  HeadOperand sinks{};
};

}  // namespace ladon
