// Instantiates Hopper's forward kernels of one dtype, with some rules or all.
#pragma once

#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/forward_launch.h"

namespace ladon::cuda::hopper {

template <class Half, int kHead, int kValue, ForwardRules kRules>
void launch_forward(Queue& queue, int blocks, const HopperForwardParams& params) {
  constexpr std::size_t kAlignment = 1024;
  using Memory = ForwardMemory<kHead, kValue, kRules>;
  queue.launch(forward_wgmma<Half, kHead, kValue, kRules>,
               {dim3(static_cast<unsigned>(blocks)), dim3(Memory::Shape::kThreads),
                sizeof(Memory) + kAlignment},
               params);
}

template <class Half, ForwardRules kRules>
void launch_forward(Queue& queue, int blocks, ForwardColumns columns,
                    const HopperForwardParams& params) {
  switch (columns) {
    case ForwardColumns::k64: return launch_forward<Half, 64, 64, kRules>(queue, blocks, params);
    case ForwardColumns::k128: return launch_forward<Half, 128, 128, kRules>(queue, blocks, params);
    case ForwardColumns::k192And128:
      return launch_forward<Half, 192, 128, kRules>(queue, blocks, params);
    case ForwardColumns::k256: return launch_forward<Half, 256, 256, kRules>(queue, blocks, params);
  }
}

}  // namespace ladon::cuda::hopper
