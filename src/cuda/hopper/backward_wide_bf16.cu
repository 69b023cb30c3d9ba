// The kernels of heads up to 256.

#include "cuda/hopper/backward_launch.h"
#include "cuda/hopper/backward_wide_keys.cuh"
#include "cuda/hopper/backward_wide_rows.cuh"

namespace ladon::cuda::hopper {
namespace {

template <class Memory>
Grid grid_of(int blocks) {
  constexpr std::size_t kAlignment = 1024;
  constexpr std::size_t kBytes = sizeof(Memory) + kAlignment;
  static_assert(kBytes <= 227 * 1024);
  return {dim3(static_cast<unsigned>(blocks)), dim3(kBackwardThreads), kBytes};
}

}  // namespace

void launch_wide_keys_bf16(Queue& queue, int blocks, const HopperBackwardParams& params) {
  queue.launch(backward_wide_keys<__nv_bfloat16>, grid_of<WideKeysMemory>(blocks), params);
}

void launch_wide_rows_bf16(Queue& queue, int blocks, const HopperBackwardParams& params) {
  queue.launch(backward_wide_rows<__nv_bfloat16>, grid_of<WideRowsMemory>(blocks), params);
}

}  // namespace ladon::cuda::hopper
