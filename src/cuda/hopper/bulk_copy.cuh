// Copies of boxes of a tensor to shared memory by Hopper's copy engine (TMA).
//
// A tensor map (tensor_map.h) describes the tensor; coordinates choose the box, and elements
// outside the tensor become 0. A box is 64 16-bit columns wide: 128 bytes a row, whose 16-byte
// chunks are permuted by the row's last three bits, as wgmma's descriptors and swizzled_offset()
// expect.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/hopper/barrier.cuh"

namespace ladon::cuda::hopper {

inline constexpr int kBoxColumns = 64;
inline constexpr int kBoxRowBytes = kBoxColumns * 2;

/// Where dynamic shared memory has its first multiple of 1024, which the permutation counts from;
/// it need not start there. By an offset, so that the compiler still knows it for shared memory:
/// loads through a pointer that was an integer take the slower way of any memory.
__device__ __forceinline__ unsigned char* aligned_memory(unsigned char* shared) {
  return shared + (0U - shared_address(shared)) % 1024U;
}

/// The byte offset of 16-byte chunk 0 to 7 of a row, in a box that starts at a multiple of 1024.
__device__ __forceinline__ std::uint32_t swizzled_offset(int row, int chunk) {
  return static_cast<std::uint32_t>(row * kBoxRowBytes + ((chunk ^ (row & 7)) << 4));
}

/// Loads the map itself ahead of its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

/// Starts a copy whose bytes `barrier` waits for. One thread calls it.
__device__ __forceinline__ void copy_box(std::uint32_t to, const CUtensorMap& map, int x, int y,
                                         int z, const Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier.address())
      : "memory");
}

/// Starts a copy from shared memory, to those elements of the box that the tensor has. One thread
/// calls it, after publish_writes() by those that wrote there.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int x, int y, int z,
                                          std::uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%1, %2, %3}], [%4];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(from)
      : "memory");
}
/// Makes a group of what this thread has started to copy from shared memory.
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Waits until shared memory has been read by this thread's groups, and may be written again.
__device__ __forceinline__ void finish_reading() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Four 8 x 8 matrices to shared memory, as load_matrices() reads them.
__device__ __forceinline__ void store_matrices(std::uint32_t address,
                                               const std::uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

}  // namespace ladon::cuda::hopper
