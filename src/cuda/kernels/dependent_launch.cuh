// Programmatic dependent launch: a kernel starts while the one before it on its stream still runs,
// and waits inside, before it touches memory that the other may write or read.
//
// A kernel that is launched with Grid::starts_early calls wait_for_kernel_before() before it
// touches memory, in every thread. It calls start_kernel_after() when most of its work is done:
// blocks that wait on a multiprocessor slow down what the others read (H200, 134 MB: 41 us instead
// of 32), and so did prefetching to L2 while they wait. Short kernels call take_over() first.
//
// For Hopper's machine code; for others all of this is nothing.
#pragma once

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

/// Both, for kernels that take a few microseconds.
__device__ inline void take_over() {
  wait_for_kernel_before();
  start_kernel_after();
}

}  // namespace ladon::cuda
