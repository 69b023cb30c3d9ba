// Instantiates the tensor-core forward kernels of one dtype.
#pragma once

#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {

template <class Half, int kWarps, bool kStreamed, bool kFull>
void launch_forward_mma(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params) {
  std::size_t bytes = sizeof(ForwardMemory<Half, kWarps, kStreamed, kFull>);
  if (kStreamed) {
    const std::int64_t tiles = (params.call.head_dim + kTileColumns - 1) / kTileColumns;
    bytes += static_cast<std::size_t>(tiles * kWarps * 16 * kTileRowBytes);
  }
  queue.launch(forward_mma<Half, kWarps, kStreamed, kFull>,
               {dim3(static_cast<unsigned>(tasks)), dim3(32 * kWarps), bytes}, params);
}

template <class Half, int kWarps>
void launch_forward_mma(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  // All rules and the queries are too much for the registers.
  if (kind.full) return launch_forward_mma<Half, kWarps, true, true>(queue, tasks, params);
  kind.streamed ? launch_forward_mma<Half, kWarps, true, false>(queue, tasks, params)
                : launch_forward_mma<Half, kWarps, false, false>(queue, tasks, params);
}

template <class Half>
void launch_forward_mma(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  kind.few_rows ? launch_forward_mma<Half, 1>(queue, kind, tasks, params)
                : launch_forward_mma<Half, 4>(queue, kind, tasks, params);
}

}  // namespace ladon::cuda
