// Instantiates the tensor-core forward kernels of one dtype.
#pragma once

#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {

template <class Half, int kWarps, bool kStreamed, ForwardRules kRules, bool kShared = false>
void launch_forward_mma(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params) {
  using Memory = ForwardMemory<Half, kWarps, kStreamed, kRules, kShared>;
  std::size_t bytes = sizeof(Memory);
  if (kStreamed) {
    const std::int64_t tiles = (params.call.head_dim + kTileColumns - 1) / kTileColumns;
    bytes += static_cast<std::size_t>(tiles * Memory::kQueryBytes);
  }
  queue.launch(forward_mma<Half, kWarps, kStreamed, kRules, kShared>,
               {dim3(static_cast<unsigned>(tasks)), dim3(32 * kWarps), bytes}, params);
}

template <class Half, int kWarps>
void launch_forward_mma(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  using enum ForwardRules;
  // All rules and the queries are too much for the registers.
  if (kind.rules == kAll) return launch_forward_mma<Half, kWarps, true, kAll>(queue, tasks, params);
  kind.streamed ? launch_forward_mma<Half, kWarps, true, kWindow>(queue, tasks, params)
                : launch_forward_mma<Half, kWarps, false, kWindow>(queue, tasks, params);
}

template <class Half>
void launch_forward_mma(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  using enum ForwardRules;
  if (!kind.few_rows) return launch_forward_mma<Half, 4>(queue, kind, tasks, params);
  if (kind.rules == kIntegers) {
    return launch_forward_mma<Half, 2, true, kIntegers, true>(queue, tasks, params);
  }
  // Blocks of one warp are enough to wait for nothing but memory where there are four of them for
  // every multiprocessor.
  if (kind.rules == kWindow && !kind.streamed && tasks <= 4 * queue.num_multiprocessors()) {
    return launch_forward_mma<Half, 4, true, kWindow, true>(queue, tasks, params);
  }
  launch_forward_mma<Half, 1>(queue, kind, tasks, params);
}

}  // namespace ladon::cuda
