// Sums of earlier segments in global memory: folds for heads whose sums leave no shared memory for
// them.
#pragma once

#include <cstdint>

#include "cuda/kernels/softmax_state.cuh"
#include "cuda/kernels/tensor_core.cuh"

namespace ladon::cuda::hopper {

/// Groups of columns that are on their way at a time, through places in shared memory: registers
/// hold few. 2 KiB of a warp at once, in registers, left a fold waiting for L2 eight times.
inline constexpr int kGroupsOnTheWay = 8;
inline constexpr int kEarlierBytes = kGroupsOnTheWay * 32 * static_cast<int>(sizeof(float4));

/// Folds in a thread's sums of earlier segments, which no other thread reads: every 32nd from
/// `earlier` on. It has every 32nd of kGroupsOnTheWay places from `places` on. After the last
/// segment the sums stay in registers.
template <int kGroups>
__device__ __forceinline__ void fold_in(float (&sums)[kGroups][4], const Fold<float> (&folds)[2],
                                        float4* earlier, float4* places, bool has_earlier,
                                        bool is_last) {
  const auto start = [&](int n) {
    if (n < kGroups) {
      copy_async_16(shared_address(places + n % kGroupsOnTheWay * 32), earlier + n * 32, 16);
    }
    commit_copies();
  };
  if (has_earlier) {
#pragma unroll
    for (int n = 0; n < kGroupsOnTheWay; ++n) start(n);
  }
#pragma unroll
  for (int n = 0; n < kGroups; ++n) {
    if (has_earlier) {
      wait_for_copies<kGroupsOnTheWay - 1>();
      const float4 before = places[n % kGroupsOnTheWay * 32];
      start(n + kGroupsOnTheWay);
      sums[n][0] = folds[0](before.x, sums[n][0]);
      sums[n][1] = folds[0](before.y, sums[n][1]);
      sums[n][2] = folds[1](before.z, sums[n][2]);
      sums[n][3] = folds[1](before.w, sums[n][3]);
    }
    if (!is_last) earlier[n * 32] = make_float4(sums[n][0], sums[n][1], sums[n][2], sums[n][3]);
  }
}

}  // namespace ladon::cuda::hopper
