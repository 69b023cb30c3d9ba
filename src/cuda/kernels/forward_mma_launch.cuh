// The tensor-core forward kernels of one dtype, and their launches.
#pragma once

#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/forward_launch.h"
#include "cuda/kernels/forward_mma.cuh"

namespace ladon::cuda {

/// Blocks of threads for which a multiprocessor must have registers. Where warps share rows, as
/// many as it has shared memory for.
constexpr int least_blocks(int warps, bool streamed, ForwardRules rules, bool shared) {
  if (shared) return 3;
  return warps == 4 && (rules == ForwardRules::kAll || !streamed) ? 2 : 1;
}

template <class Half, int kWarps, bool kStreamed, ForwardRules kRules, bool kShared = false,
          bool kChains = false>
__global__ void __launch_bounds__(32 * kWarps, least_blocks(kWarps, kStreamed, kRules, kShared))
    forward_mma(const __grid_constant__ ForwardParams<float> params) {
  using Tile = ForwardTile<Half, kWarps, kStreamed, kRules, kShared, kChains>;
  extern __shared__ __align__(128) unsigned char shared[];
  if constexpr (Tile::kRows == 16) wait_for_kernel_before();
  const ForwardTask task(params, blockIdx.x);
  // The other kernels have no registers left to choose with.
  const Sequence& sequence = kRules == ForwardRules::kWindow ? sequence_of(params, task.sequence)
                                                             : params.call.sequences[task.sequence];
  Tile(params, task, sequence, *reinterpret_cast<typename Tile::Memory*>(shared)).run();
  if constexpr (Tile::kRows == 16) start_kernel_after();
}

template <class Half, int kWarps, bool kStreamed, ForwardRules kRules, bool kShared = false,
          bool kChains = false>
void launch_forward_mma(Queue& queue, std::int64_t tasks, const ForwardParams<float>& params) {
  using Tile = ForwardTile<Half, kWarps, kStreamed, kRules, kShared, kChains>;
  using Memory = typename Tile::Memory;
  std::size_t bytes = sizeof(Memory);
  if (kStreamed) {
    const std::int64_t tiles = (params.call.head_dim + kTileColumns - 1) / kTileColumns;
    bytes += static_cast<std::size_t>(tiles * Memory::kQueryBytes);
  }
  queue.launch(forward_mma<Half, kWarps, kStreamed, kRules, kShared, kChains>,
               {dim3(static_cast<unsigned>(tasks)), dim3(32 * kWarps), bytes, Tile::kRows == 16},
               params);
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

/// At most 16 rows a KV head, heads up to 128.
template <class Half, ForwardRules kRules>
void launch_decode_mma(Queue& queue, bool chains, std::int64_t tasks,
                       const ForwardParams<float>& params) {
  if (chains) {
    return launch_forward_mma<Half, 1, false, kRules, false, true>(queue, tasks, params);
  }
  // Up to so many blocks a multiprocessor, two warps for each are faster than one.
  const std::int64_t few = 2 * queue.num_multiprocessors();
  tasks <= few ? launch_forward_mma<Half, 2, true, kRules, true>(queue, tasks, params)
               : launch_forward_mma<Half, 1, false, kRules>(queue, tasks, params);
}

template <class Half>
void launch_forward_mma(Queue& queue, const ForwardKind& kind, std::int64_t tasks,
                        const ForwardParams<float>& params) {
  using enum ForwardRules;
  if (!kind.few_rows) {
    launch_forward_mma<Half, 4>(queue, kind, tasks, params);
  } else if (kind.rules == kWindow && !kind.streamed) {
    launch_decode_mma<Half, kWindow>(queue, kind.chains, tasks, params);
  } else {
    launch_forward_mma<Half, 1>(queue, kind, tasks, params);
  }
}

}  // namespace ladon::cuda
