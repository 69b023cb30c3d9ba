// Backward of RMS norm (weight: the stored one plus its offset). With f = 1 / sqrt(mean(x^2) +
// epsilon) and u = x * f, row by row:
//
//   dx = f * (dy * weight - u * mean(u * dy * weight)),    dweight += sum over rows of u * dy
//
// In a layer norm x is less its mean, and the mean of dy * weight is subtracted next to u's term.
// Where heads have weights of their own, each head is a launch, over every heads-th row.
//
// A task is a block's: up to 512 tasks share the rows out, by their number alone. Groups of threads
// take every group-th row of a task, in tiles of 4: first the two sums of each row, then, chunk by
// chunk of 8 columns, the rows' dx and their part of dweight, which so touches memory once a tile.
// A second kernel adds up the tasks' sums in order.
//
// Everything is computed in double, because dx is a difference. Per element: 8 conversions and 9
// f64 operations; x and dy twice, once of that from L2, and dx once. The limit is the conversions.

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "cuda/kernels/norm.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

constexpr std::int64_t kMostTasks = 512;
constexpr int kTileRows = 4;

struct NormBackwardParams {
  NormParams norm;
  double inverse_dim;
  std::int64_t rows_per_task;
  double* sums;  // of dweight, [task, group, column]; after the kernel group 0 has those of all
};

/// What all elements of a row share.
struct RowSums {
  double inverse_rms;
  double mean;    // of u * dy * weight
  double center;  // of x, and of dy * weight: 0 but in a layer norm
  double gradient_mean;
};

/// Called by the whole block; `row` is not read where it does not exist.
__device__ inline RowSums sums_of_row(const NormBackwardParams& params, const NormLane& lane,
                                      std::int64_t row, bool exists) {
  const NormParams& norm = params.norm;
  const double center = center_of_row(norm, lane, row, exists);
  double squares = 0;
  double products = 0;
  double gradients = 0;
  if (exists) {
    for_each_chunk(lane, norm.dim, [&](std::int64_t i, int count) {
      const Chunk<double> x = load_chunk<double>(norm.x, row, i, count);
      const Chunk<double> dy = load_chunk<double>(norm.dy, row, i, count);
      const Chunk<double> weight = load_chunk<double>(norm.weight, 0, i, count);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) {
        const double value = n < count ? x.values[n] - center : 0;
        squares = fma(value, value, squares);
        products = fma(value * dy.values[n], weight.values[n] + norm.weight_offset, products);
        gradients = fma(dy.values[n], weight.values[n] + norm.weight_offset, gradients);
      }
    });
  }
  squares = sum_of_threads(squares, lane.threads);
  products = sum_of_threads(products, lane.threads);
  gradients = norm.centered ? sum_of_threads(gradients, lane.threads) : 0;
  const double inverse_rms = rsqrt(fma(squares, params.inverse_dim, norm.epsilon));
  return {inverse_rms, inverse_rms * products * params.inverse_dim, center,
          gradients * params.inverse_dim};
}

__global__ void __launch_bounds__(kThreads)
    norm_backward_rows(const __grid_constant__ NormBackwardParams params) {
  // Each thread's own copy, which needs no barrier and, unlike an array, no registers.
  __shared__ RowSums of_row[kTileRows][kThreads];
  const NormParams& norm = params.norm;
  const NormLane lane(norm.dim);
  const int groups = kThreads / lane.threads;
  const std::int64_t begin = blockIdx.x * params.rows_per_task;
  const std::int64_t end = min(begin + params.rows_per_task, norm.rows);
  double* const task_sums = params.sums + blockIdx.x * groups * norm.dim;
  double* const sums = task_sums + lane.group * norm.dim;
  for (std::int64_t tile = begin; tile < end; tile += groups * kTileRows) {
    const std::int64_t first = tile + lane.group;
    for (int r = 0; r < kTileRows; ++r) {
      const std::int64_t row = first + r * groups;
      of_row[r][threadIdx.x] = sums_of_row(params, lane, row, row < end);
    }
    for_each_chunk(lane, norm.dim, [&](std::int64_t i, int count) {
      const Chunk<double> weight = load_chunk<double>(norm.weight, 0, i, count);
      Chunk<double> sum{};
      if (tile != begin) sum = load_chunk_of<double>(sums + i, count);
      for (int r = 0; r < kTileRows && first + r * groups < end; ++r) {
        const std::int64_t row = first + r * groups;
        const auto [inverse_rms, mean, center, gradient_mean] = of_row[r][threadIdx.x];
        const Chunk<double> x = load_chunk<double>(norm.x, row, i, count);
        Chunk<double> dy = load_chunk<double>(norm.dy, row, i, count);
#pragma unroll
        for (int n = 0; n < kChunk; ++n) {
          const double unit = (x.values[n] - center) * inverse_rms;
          sum.values[n] = fma(unit, dy.values[n], sum.values[n]);
          const double gradient =
              fma(-unit, mean, dy.values[n] * (weight.values[n] + norm.weight_offset));
          dy.values[n] = inverse_rms * (gradient - gradient_mean);
        }
        store_chunk(norm.dx, row, i, count, dy);
      }
      store_chunk_of(sums + i, count, sum);
    });
  }
  if (groups == 1) return;
  __syncthreads();  // the sums of all groups are written
  for (std::int64_t i = threadIdx.x; i < norm.dim; i += kThreads) {
    double total = 0;
    for (int group = 0; group < groups; ++group) total += task_sums[group * norm.dim + i];
    task_sums[i] = total;
  }
}

struct TaskSumsParams {
  const double* sums;  // [task, task_stride]
  std::int64_t task_stride;
  std::int64_t tasks;
  std::int64_t dim;
  Matrix dweight;
};

// A block of 32 columns by 8 threads, each of which sums every eighth task.
constexpr int kColumns = 32;
constexpr int kTaskLanes = 8;

__global__ void __launch_bounds__(kColumns* kTaskLanes)
    add_task_sums(const __grid_constant__ TaskSumsParams params) {
  __shared__ double partial[kTaskLanes][kColumns];
  const std::int64_t column = std::int64_t{blockIdx.x} * kColumns + threadIdx.x;
  double sum = 0;
  if (column < params.dim) {
    for (std::int64_t task = threadIdx.y; task < params.tasks; task += kTaskLanes) {
      sum += params.sums[task * params.task_stride + column];
    }
  }
  partial[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= params.dim) return;
  double total = load_element<double>(params.dweight.data, params.dweight.dtype, column);
  for (int lane = 0; lane < kTaskLanes; ++lane) total += partial[lane][threadIdx.x];
  store_element(params.dweight.data, params.dweight.dtype, column, total);
}

/// Every weight_rows-th row from `first` on, which all have the same weight.
NormParams rows_of_one_weight(NormParams params, std::int64_t first) {
  const auto skip = [](Matrix& matrix, std::int64_t rows) {
    if (matrix.data == nullptr) return;
    const auto bytes = static_cast<std::size_t>(rows * matrix.stride) * size_of(matrix.dtype);
    matrix.data = static_cast<std::byte*>(matrix.data) + bytes;
  };
  for (Matrix* const matrix : {&params.x, &params.dy, &params.dx}) {
    skip(*matrix, first);
    matrix->stride *= params.weight_rows;
  }
  skip(params.weight, first);
  skip(params.dweight, first);
  params.rows /= params.weight_rows;
  params.weight_rows = 1;
  return params;
}

void norm_backward(Queue& queue, const NormParams& params) {
  const std::int64_t groups = kThreads / threads_per_row(params.dim);
  const std::int64_t rows_per_task =
      std::max(groups * kTileRows, ceil_div(params.rows, kMostTasks));
  const std::int64_t tasks = ceil_div(params.rows, rows_per_task);
  const Workspace memory(queue.scratch(),
                         static_cast<std::size_t>(tasks * groups * params.dim) * sizeof(double));
  double* const sums = reinterpret_cast<double*>(memory.data());
  queue.launch(
      norm_backward_rows, Grid{static_cast<unsigned>(tasks), kThreads},
      NormBackwardParams{params, 1 / static_cast<double>(params.dim), rows_per_task, sums});
  queue.launch(add_task_sums, Grid{blocks_for(params.dim, kColumns), {kColumns, kTaskLanes}},
               TaskSumsParams{sums, groups * params.dim, tasks, params.dim, params.dweight});
}

}  // namespace

void rms_norm_backward(Queue& queue, const NormParams& params) {
  if (params.rows == 0 || params.dim == 0) return;
  for (std::int64_t row = 0; row < params.weight_rows; ++row) {
    norm_backward(queue, rows_of_one_weight(params, row));
  }
}

}  // namespace ladon::cuda
