#include "cuda/hopper/tensor_map.h"

#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

namespace ladon::cuda::hopper {
namespace {

/// The driver's function, or null. Looked up at run time: the library does not link the driver.
PFN_cuTensorMapEncodeTiled_v12000 find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned kVersion = 12000;
  const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                              kVersion, cudaEnableDefault, &result);
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
}

constexpr std::int64_t kGranule = 16;  // bytes
constexpr std::int64_t kElementBytes = 2;

}  // namespace

std::optional<CUtensorMap> make_tensor_map(const BoxedTensor& tensor) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encoder();
  if (encode == nullptr || reinterpret_cast<std::uintptr_t>(tensor.data) % kGranule != 0) {
    return std::nullopt;
  }
  cuuint64_t sizes[3];
  cuuint64_t strides[2];
  cuuint32_t box[3];
  const cuuint32_t steps[3] = {1, 1, 1};
  for (int dim = 0; dim < 3; ++dim) {
    constexpr std::int64_t kLargest = (std::int64_t{1} << 31) - 1;  // coordinates are 32-bit
    if (tensor.sizes[dim] < 1 || tensor.sizes[dim] > kLargest) return std::nullopt;
    sizes[dim] = static_cast<cuuint64_t>(tensor.sizes[dim]);
    box[dim] = static_cast<cuuint32_t>(tensor.box[dim]);
  }
  for (int dim = 0; dim < 2; ++dim) {
    constexpr std::int64_t kLargest = (std::int64_t{1} << 40) - 1;
    const std::int64_t bytes =
        tensor.sizes[dim + 1] == 1 ? kGranule : tensor.strides[dim] * kElementBytes;
    if (bytes < kGranule || bytes > kLargest || bytes % kGranule != 0) return std::nullopt;
    strides[dim] = static_cast<cuuint64_t>(bytes);
  }
  CUtensorMap map;
  const CUresult status =
      encode(&map,
             tensor.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                          : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
             3, const_cast<void*>(tensor.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) return std::nullopt;
  return map;
}

}  // namespace ladon::cuda::hopper
