// Sums and maxima over the threads of a block, in an order that depends on their number alone.
#pragma once

#include <cstdint>

namespace ladon::cuda {

inline constexpr unsigned kAllLanes = 0xffffffffU;
inline constexpr int kWarp = 32;

/// Combines the values of each `threads` consecutive threads; all of them get the result. `threads`
/// is a power of two that divides the (one-dimensional) block, which calls this as a whole.
/// `combine` is commutative to the bit.
template <class Combine>
__device__ inline double combine_threads(double value, int threads, const Combine& combine) {
  for (int distance = (threads < kWarp ? threads : kWarp) / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, distance));
  }
  if (threads <= kWarp) return value;
  __shared__ double warps[kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  __syncthreads();  // readers of the previous results are done
  if (threadIdx.x % kWarp == 0) warps[warp] = value;
  __syncthreads();
  const int count = threads / kWarp;
  const int first = warp / count * count;
  value = warps[first];
  for (int other = 1; other < count; ++other) value = combine(value, warps[first + other]);
  return value;
}

__device__ inline double sum_of_threads(double value, int threads) {
  return combine_threads(value, threads, [](double a, double b) { return a + b; });
}

/// NaN is passed over.
__device__ inline double largest_of_threads(double value, int threads) {
  return combine_threads(value, threads, [](double a, double b) { return fmax(a, b); });
}

}  // namespace ladon::cuda
