// Clusters of Hopper kernels: blocks of threads that run at the same time on neighbouring
// multiprocessors, reach each other's barriers, and share what the copy engine brings.
//
// No block of a cluster may end before the others are done with its shared memory, which includes
// arrivals at its barriers.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/hopper/barrier.cuh"
#include "cuda/hopper/l2_policy.h"

namespace ladon::cuda::hopper {

/// Of this block of threads in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
  unsigned rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

/// Waits for all threads of the cluster. What they did before is known to all afterwards. The
/// hardware counts warps: threads of one that came apart would count twice.
__device__ __forceinline__ void sync_cluster() {
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

/// Arrives at the same barrier of a block of the cluster. With the order of writes that a release
/// to the whole cluster gives, all earlier stores would be waited for: this tells that reads are
/// done.
__device__ __forceinline__ void arrive_at(const Barrier& barrier, unsigned rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there;\n"
      "mapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}" ::"r"(barrier.address()),
      "r"(rank)
      : "memory");
}

/// copy_box() with a policy.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                         int z, const Barrier& barrier, L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address()), "l"(policy)
      : "memory");
}

/// To all blocks of the cluster whose bit is in `ranks`.
struct Multicast {
  std::uint16_t ranks;
  L2Policy policy;
};

/// The same to several blocks: to the same place in the shared memory of each, where the same
/// barrier waits for the bytes.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                         int z, const Barrier& barrier,
                                         const Multicast& multicast) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3, %4}], [%5], %6, %7;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address()), "h"(multicast.ranks),
      "l"(multicast.policy)
      : "memory");
}

}  // namespace ladon::cuda::hopper
