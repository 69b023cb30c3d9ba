// Products of Hopper's backward kernels: scores of tiles in shared memory, and sums whose operand A
// is P or dS in registers.
#pragma once

#include <cstdint>

#include "cuda/hopper/bulk_copy.cuh"
#include "cuda/hopper/wgmma.cuh"

namespace ladon::cuda::hopper {

/// S or dP: scores = own other^T, over all columns of both tiles. The registers of the scores are
/// held in place, and begin_products() called, before.
template <class Half, int kGroups, int kBoxes, int kOwnBytes, int kOtherBytes>
__device__ __forceinline__ void start_score(float (&scores)[kGroups][4],
                                            const unsigned char (&own)[kBoxes][kOwnBytes],
                                            const unsigned char (&other)[kBoxes][kOtherBytes]) {
  const TileOperand a(shared_address(own), kOwnBytes);
  const TileOperand b(shared_address(other), kOtherBytes);
  start_product<Half, false>(scores, a.descriptor(0), b.descriptor(0));
#pragma unroll
  for (int step = 1; step < kBoxes * kBoxColumns / 16; ++step) {
    start_product<Half, true>(scores, a.descriptor(step / 4 * kOwnBytes + step % 4 * 32),
                              b.descriptor(step / 4 * kOtherBytes + step % 4 * 32));
  }
}

/// Operand A of the first kSteps steps of a score: own rows of this warpgroup from shared memory to
/// registers. A product whose A is in registers reads half as much from shared memory, where
/// columns of the product are 64.
template <int kSteps, int kBoxes, int kBoxBytes>
__device__ __forceinline__ void hold_operand(const unsigned char (&own)[kBoxes][kBoxBytes],
                                             std::uint32_t (&a)[kSteps][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int row = static_cast<int>(threadIdx.x) % kGroupThreads / 32 * 16 + lane % 16;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_matrices(a[step],
                  shared_address(own[step / 4]) + swizzled_offset(row, step % 4 * 2 + lane / 16));
  }
}

/// The same as the other start_score(), with A of the first steps in registers.
template <class Half, int kGroups, int kHeld, int kBoxes, int kOwnBytes, int kOtherBytes>
__device__ __forceinline__ void start_score(float (&scores)[kGroups][4],
                                            std::uint32_t (&held)[kHeld][4],
                                            const unsigned char (&own)[kBoxes][kOwnBytes],
                                            const unsigned char (&other)[kBoxes][kOtherBytes]) {
  const TileOperand a(shared_address(own), kOwnBytes);
  const TileOperand b(shared_address(other), kOtherBytes);
  start_product<Half, false, false>(scores, held[0], b.descriptor(0));
#pragma unroll
  for (int step = 1; step < kBoxes * kBoxColumns / 16; ++step) {
    const std::uint64_t of_other = b.descriptor(step / 4 * kOtherBytes + step % 4 * 32);
    if (step < kHeld) {
      start_product<Half, false>(scores, held[step < kHeld ? step : 0], of_other);
    } else {
      start_product<Half, true>(scores, a.descriptor(step / 4 * kOwnBytes + step % 4 * 32),
                                of_other);
    }
  }
}

/// dk += dS^T q, dv += P^T dout, or dq += dS k: sums += a rows, 16 rows for each step of a.
template <class Half, int kGroups, int kSteps, int kBoxes, int kBoxBytes>
__device__ __forceinline__ void start_sum(float (&sums)[kGroups][4], std::uint32_t (&a)[kSteps][4],
                                          const unsigned char (&rows)[kBoxes][kBoxBytes]) {
  const TileOperand b(shared_address(rows), kBoxBytes);
  hold_in_place(sums);
  hold_in_place(a);
  begin_products();
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    start_product<Half, true>(sums, a[step], b.descriptor(step * 16 * kBoxRowBytes));
  }
  commit_products();
}

}  // namespace ladon::cuda::hopper
