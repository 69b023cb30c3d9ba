// Launches of Hopper's backward kernels, for the files that instantiate them.
#pragma once

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/backward_finish.cuh"
#include "cuda/hopper/backward_launch.h"

namespace ladon::cuda::hopper {

/// Calls launch(shape).
template <class Launch>
void with_backward_shape(BackwardWidth width, const Launch& launch) {
  switch (width) {
    case BackwardWidth::k64: return launch(NarrowShape{});
    case BackwardWidth::k128: return launch(MiddleShape{});
    case BackwardWidth::k192And128: return launch(LatentShape{});
    case BackwardWidth::k256: return;  // other kernels
  }
}

template <class Half>
void launch_backward(Queue& queue, int blocks, BackwardWidth width,
                     const HopperBackwardParams& params) {
  with_backward_shape(width, [&](auto shape) {
    constexpr std::size_t kAlignment = 1024;
    using Shape = decltype(shape);
    queue.launch(backward_wgmma<Half, Shape>,
                 {dim3(static_cast<unsigned>(blocks)), dim3(kBackwardThreads),
                  sizeof(BackwardMemory<Shape>) + kAlignment},
                 params);
  });
}

template <class Half>
void launch_finish_dq(Queue& queue, BackwardWidth width, const HopperBackwardParams& params) {
  const BackwardParams& backward = params.backward;
  const std::int64_t tiles = backward.num_row_tiles * backward.call.num_heads;
  with_backward_shape(width, [&](auto shape) {
    queue.launch(finish_dq<Half, decltype(shape)>,
                 {dim3(static_cast<unsigned>(tiles)), dim3(kBlockTiles * kGroupThreads)}, params);
  });
}

}  // namespace ladon::cuda::hopper
