// Instantiates Hopper's backward kernels of one dtype and result.
#pragma once

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_launch.h"

namespace ladon::cuda::hopper {

template <class Half, int kColumns, bool kOwnKeys>
void launch_backward(Queue& queue, int blocks, const HopperBackwardParams& params) {
  constexpr std::size_t kAlignment = 1024;
  using Memory = BackwardMemory<kColumns, kOwnKeys>;
  queue.launch(
      backward_wgmma<Half, kColumns, kOwnKeys>,
      {dim3(static_cast<unsigned>(blocks)), dim3(Memory::kThreads), sizeof(Memory) + kAlignment},
      params);
}

template <class Half, bool kOwnKeys>
void launch_backward(Queue& queue, int blocks, bool is_wide, const HopperBackwardParams& params) {
  is_wide ? launch_backward<Half, 128, kOwnKeys>(queue, blocks, params)
          : launch_backward<Half, 64, kOwnKeys>(queue, blocks, params);
}

}  // namespace ladon::cuda::hopper
