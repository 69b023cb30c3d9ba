// Programmatic dependent launch: a kernel starts while the one before it on its stream still runs,
// and waits inside, before it touches memory that the other may write or read.
//
// A kernel that is launched with Grid::starts_early calls wait_for_kernel_before() first in every
// thread. What it may do earlier is compute addresses and prefetch to L2, which is where all
// writes meet: data that is fetched too early is written there again. These kernels let the next
// one start as soon as they have waited themselves, so that at most two run at a time.
//
// Hopper and newer; compiled for others, all of this is nothing.
#pragma once

#include <cstdint>

namespace ladon::cuda {

/// Until the kernel before is over, and what it wrote can be read.
__device__ inline void wait_for_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/// Starts the next kernel as soon as all blocks of this one have come here.
__device__ inline void start_kernel_after() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/// The first statement of most kernels that start early.
__device__ inline void take_over() {
  wait_for_kernel_before();
  start_kernel_after();
}

/// Brings the line of 128 bytes that holds an address to L2.
__device__ inline void prefetch_line(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}
inline constexpr std::int64_t kLineBytes = 128;

}  // namespace ladon::cuda
