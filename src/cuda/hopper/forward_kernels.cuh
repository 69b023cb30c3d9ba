// Instantiates Hopper's forward kernels of one dtype.
#pragma once

#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/forward_launch.h"

namespace ladon::cuda::hopper {

template <class Half, int kColumns>
void launch_forward(Queue& queue, int blocks, const HopperForwardParams& params) {
  constexpr std::size_t kAlignment = 1024;
  queue.launch(forward_wgmma<Half, kColumns>,
               {dim3(static_cast<unsigned>(blocks)), dim3(kForwardThreads),
                sizeof(ForwardMemory<kColumns>) + kAlignment},
               params);
}

template <class Half>
void launch_forward(Queue& queue, int blocks, bool is_wide, const HopperForwardParams& params) {
  is_wide ? launch_forward<Half, 128>(queue, blocks, params)
          : launch_forward<Half, 64>(queue, blocks, params);
}

}  // namespace ladon::cuda::hopper
