// Instantiates Hopper's forward kernels of one dtype.
#pragma once

#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/forward_launch.h"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue>
void launch_forward(Queue& queue, int blocks, const HopperForwardParams& params) {
  constexpr std::size_t kAlignment = 1024;
  queue.launch(forward_wgmma<Half, kHead, kValue>,
               {dim3(static_cast<unsigned>(blocks)), dim3(ForwardShape<kHead, kValue>::kThreads),
                sizeof(ForwardMemory<kHead, kValue>) + kAlignment},
               params);
}

}  // namespace ladon::cuda::hopper
