// What RMS and layer norm and their backward share: which threads have which elements of a row.
#pragma once

#include <cstdint>

#include "core/norm_params.h"
#include "cuda/kernels/chunk.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/reduce.cuh"

namespace ladon::cuda {

/// Threads of one row: a power of two that gives each a chunk of 8 elements, at most a block. By
/// the row's length alone, because it decides the order of sums.
constexpr int threads_per_row(std::int64_t dim) {
  int threads = 1;
  while (threads < kThreads && threads * kChunk < dim) threads *= 2;
  return threads;
}

/// One of the rows that a block works on at a time.
struct NormLane {
  int threads;  // of each row
  int group;    // which of the block's rows
  int rank;     // which of the row's threads

  __device__ explicit NormLane(std::int64_t dim)
      : threads(threads_per_row(dim)),
        group(static_cast<int>(threadIdx.x) / threads),
        rank(static_cast<int>(threadIdx.x) % threads) {}
};

/// Calls function(i, count) for each chunk of a thread: `count` elements of the row from i on.
template <class Function>
__device__ inline void for_each_chunk(const NormLane& lane, std::int64_t dim,
                                      const Function& function) {
  for (std::int64_t i = lane.rank * kChunk; i < dim; i += lane.threads * kChunk) {
    function(i, chunk_count(dim, i));
  }
}

template <class Compute>
__device__ inline Chunk<Compute> load_chunk(const Matrix& matrix, std::int64_t row, std::int64_t i,
                                            int count) {
  return load_chunk<Compute>(matrix.data, matrix.dtype, row * matrix.stride + i, count);
}

template <class Compute>
__device__ inline void store_chunk(const Matrix& matrix, std::int64_t row, std::int64_t i,
                                   int count, const Chunk<Compute>& chunk) {
  store_chunk(matrix.data, matrix.dtype, row * matrix.stride + i, count, chunk);
}

/// The mean of a row where it is subtracted, else 0. Called by the whole block; `row` is not read
/// where it does not exist.
__device__ inline double center_of_row(const NormParams& norm, const NormLane& lane,
                                       std::int64_t row, bool exists) {
  if (!norm.centered) return 0;
  double sum = 0;
  if (exists) {
    for_each_chunk(lane, norm.dim, [&](std::int64_t i, int count) {
      const Chunk<double> x = load_chunk<double>(norm.x, row, i, count);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) sum += x.values[n];
    });
  }
  return sum_of_threads(sum, lane.threads) / static_cast<double>(norm.dim);
}

}  // namespace ladon::cuda
