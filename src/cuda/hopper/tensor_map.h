// Tensor maps: what the copy engine must know of a tensor in global memory.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <optional>

#include "ladon/dtype.h"

namespace ladon::cuda::hopper {

/// A three-dimensional tensor of 16-bit elements whose innermost dimension is contiguous, and the
/// box of it that one copy takes. Sizes in elements; a stride of a dimension of size 1 does not
/// matter.
struct BoxedTensor {
  const void* data = nullptr;
  DType dtype = DType::kBF16;
  std::int64_t sizes[3] = {};
  std::int64_t strides[2] = {};  // of the outer two dimensions
  int box[3] = {};
};

/// Nothing where the copy engine cannot take it: it wants addresses and strides of whole 16 bytes.
std::optional<CUtensorMap> make_tensor_map(const BoxedTensor& tensor);

}  // namespace ladon::cuda::hopper
