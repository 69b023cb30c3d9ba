// Sums over the heads of a group: y[row][group][i] = sum over its heads of x[row][head][i].
//
// A thread has 8 consecutive elements of a group's sum and reads its heads in order. Sums are in
// double and rounded once. Per element of x: a conversion and an addition, its bytes once; the
// limit is memory.

#include <cstdint>

#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

__global__ void __launch_bounds__(kThreads)
    sum_head_chunks(const __grid_constant__ HeadSumParams params) {
  const std::int64_t chunks = (params.dim + kChunk - 1) / kChunk;
  for_each_index(params.rows * params.groups * chunks, [&](std::int64_t index) {
    const std::int64_t i = index % chunks * kChunk;
    const std::int64_t group = index / chunks % params.groups;
    const std::int64_t row = index / chunks / params.groups;
    const int count = chunk_count(params.dim, i);
    Chunk<double> sum{};
    for (std::int64_t h = 0; h < params.group; ++h) {
      const std::int64_t head = group * params.group + h;
      const Chunk<double> x =
          load_chunk<double>(params.x.data, params.x.dtype,
                             row * params.x.stride + head * params.x_head_stride + i, count);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) sum.values[n] += x.values[n];
    }
    store_chunk(params.y.data, params.y.dtype,
                row * params.y.stride + group * params.y_head_stride + i, count, sum);
  });
}

}  // namespace

void sum_heads(Queue& queue, const HeadSumParams& params) {
  const std::int64_t chunks = params.rows * params.groups * ceil_div(params.dim, kChunk);
  queue.launch(sum_head_chunks, Grid{blocks_for(chunks, kThreads), kThreads}, params);
}

}  // namespace ladon::cuda
