// Contiguous arrays of f32 or f64 as a whole: to += from, elements times a factor, and the sum of
// squares of several arrays.
//
// Threads take 4 elements each, a block's width apart, so that their loads are under way together.
// Squares are summed by blocks of 16384 elements and then over the blocks, in a fixed order.
//
// A few operations per element, each read once and in two cases written once. The limit is memory.

#include <cstdint>
#include <vector>

#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

constexpr int kPerThread = 4;
constexpr int kPerBlock = kThreads * kPerThread;

/// Calls function(first) for each tile of kPerBlock elements of [0, count); the thread's are first,
/// first + kThreads, ...
template <class Function>
__device__ inline void for_each_tile(std::int64_t count, const Function& function) {
  for (std::int64_t tile = std::int64_t{blockIdx.x} * kPerBlock; tile < count;
       tile += std::int64_t{gridDim.x} * kPerBlock) {
    function(tile + threadIdx.x);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    accumulate_elements(const __grid_constant__ AccumulateParams params) {
  const auto* const from = static_cast<const T*>(params.from.data);
  auto* const to = static_cast<T*>(params.to.data);
  const std::int64_t count = params.to.count;
  for_each_tile(count, [&](std::int64_t first) {
    T sums[kPerThread];
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t i = first + n * kThreads;
      if (i < count) sums[n] = to[i] + from[i];
    }
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t i = first + n * kThreads;
      if (i < count) to[i] = sums[n];
    }
  });
}

struct ScaleParams {
  FloatArray array;
  double factor;
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_elements(const __grid_constant__ ScaleParams params) {
  auto* const data = static_cast<T*>(params.array.data);
  const std::int64_t count = params.array.count;
  for_each_tile(count, [&](std::int64_t first) {
    T values[kPerThread];
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t i = first + n * kThreads;
      if (i < count) values[n] = data[i];
    }
#pragma unroll
    for (int n = 0; n < kPerThread; ++n) {
      const std::int64_t i = first + n * kThreads;
      if (i < count) data[i] = static_cast<T>(static_cast<double>(values[n]) * params.factor);
    }
  });
}

// ---- magnitude ----------------------------------------------------------------------------------

// Elements whose squares one block sums.
constexpr std::int64_t kMagnitudeBlock = std::int64_t{1} << 14;

struct MagnitudeArray {
  FloatArray array;
  std::int64_t first_block;  // of its elements
};

struct MagnitudeParams {
  const MagnitudeArray* arrays;  // none is empty
  std::int64_t num_arrays;
  int exponent;
  Magnitude* blocks;
};

/// Of one thread's elements: every 256th of a block.
template <class T>
__device__ inline Magnitude magnitude_of_thread(const T* data, std::int64_t count, int exponent) {
  Magnitude result;
#pragma unroll 4
  for (std::int64_t i = threadIdx.x; i < count; i += kThreads) {
    const auto value = static_cast<double>(data[i]);
    result.largest = fmax(result.largest, fabs(value));
    const double scaled = exponent == 0 ? value : scalbn(value, -exponent);
    result.sum_of_squares = fma(scaled, scaled, result.sum_of_squares);
  }
  return result;
}

/// Thread 0 stores what all threads have together.
__device__ inline void store_magnitude(const Magnitude& of_thread, Magnitude* to) {
  const double sum = sum_of_threads(of_thread.sum_of_squares, kThreads);
  const double largest = largest_of_threads(of_thread.largest, kThreads);
  if (threadIdx.x == 0) {
    to->sum_of_squares = sum;
    to->largest = largest;
  }
}

__global__ void __launch_bounds__(kThreads)
    magnitude_of_blocks(const __grid_constant__ MagnitudeParams params) {
  // The last array that starts at this block or before.
  std::int64_t low = 0;
  std::int64_t high = params.num_arrays;
  while (high - low > 1) {
    const std::int64_t middle = (low + high) / 2;
    if (params.arrays[middle].first_block <= blockIdx.x) {
      low = middle;
    } else {
      high = middle;
    }
  }
  const FloatArray array = params.arrays[low].array;
  const std::int64_t begin = (blockIdx.x - params.arrays[low].first_block) * kMagnitudeBlock;
  const std::int64_t count = min(kMagnitudeBlock, array.count - begin);
  const Magnitude of_thread =
      array.dtype == DType::kF64
          ? magnitude_of_thread(static_cast<const double*>(array.data) + begin, count,
                                params.exponent)
          : magnitude_of_thread(static_cast<const float*>(array.data) + begin, count,
                                params.exponent);
  store_magnitude(of_thread, params.blocks + blockIdx.x);
}

struct MagnitudeSumParams {
  const Magnitude* blocks;
  std::int64_t num_blocks;
  Magnitude* total;
};

/// One block.
__global__ void __launch_bounds__(kThreads)
    sum_magnitudes(const __grid_constant__ MagnitudeSumParams params) {
  Magnitude of_thread;
  for (std::int64_t i = threadIdx.x; i < params.num_blocks; i += kThreads) {
    of_thread.sum_of_squares += params.blocks[i].sum_of_squares;
    of_thread.largest = fmax(of_thread.largest, params.blocks[i].largest);
  }
  store_magnitude(of_thread, params.total);
}

}  // namespace

void accumulate(Queue& queue, const AccumulateParams& params) {
  queue.launch(
      params.to.dtype == DType::kF64 ? accumulate_elements<double> : accumulate_elements<float>,
      Grid{blocks_for(params.to.count, kPerBlock), kThreads}, params);
}

void scale(Queue& queue, const FloatArray& array, double factor) {
  queue.launch(array.dtype == DType::kF64 ? scale_elements<double> : scale_elements<float>,
               Grid{blocks_for(array.count, kPerBlock), kThreads}, ScaleParams{array, factor});
}

Magnitude magnitude(Queue& queue, std::span<const FloatArray> arrays, int exponent) {
  std::vector<MagnitudeArray> list;
  std::int64_t num_blocks = 0;
  for (const FloatArray& array : arrays) {
    if (array.count == 0) continue;
    list.push_back({array, num_blocks});
    num_blocks += ceil_div(array.count, kMagnitudeBlock);
  }
  if (num_blocks == 0) return {};
  const HostList<MagnitudeArray> uploaded(queue, list);
  const Workspace memory(queue.scratch(),
                         static_cast<std::size_t>(num_blocks + 1) * sizeof(Magnitude));
  auto* const total = reinterpret_cast<Magnitude*>(memory.data());
  Magnitude* const blocks = total + 1;
  queue.launch(
      magnitude_of_blocks, Grid{static_cast<unsigned>(num_blocks), kThreads},
      MagnitudeParams{uploaded.data(), static_cast<std::int64_t>(list.size()), exponent, blocks});
  queue.launch(sum_magnitudes, Grid{1, kThreads}, MagnitudeSumParams{blocks, num_blocks, total});
  Magnitude result;
  queue.download(&result, total, sizeof result);
  return result;
}

}  // namespace ladon::cuda
