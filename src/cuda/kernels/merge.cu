// Merges partial attention results by their lse, row by row:
//
//   out = sum of exp(lse_i - lse) * out_i,    lse = log sum exp(lse_i), the sink included.
//
// A warp has a row (batch, token, head) and its lanes the row's columns; parts are summed in order,
// in double. Per element of a part: a multiplication and an addition, its bytes once. The limit is
// memory.

#include <cmath>
#include <cstdint>

#include "cuda/kernels/element.cuh"
#include "cuda/kernels/grid.cuh"
#include "cuda/kernels/kernel_list.cuh"
#include "cuda/kernels/reduce.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

// Parts that need no upload.
constexpr int kShortList = 32;
// Columns of a lane at a time, so that a weight serves several.
constexpr int kColumns = 4;

struct MergeKernelParams {
  std::int64_t batch;
  std::int64_t query_len;
  std::int64_t num_heads;
  std::int64_t value_dim;
  MergePart result;
  HeadOperand sinks;
  std::int64_t num_parts;
  KernelList<MergePart, kShortList> parts;
};

struct MergeRow {
  std::int64_t batch;
  std::int64_t token;
  std::int64_t head;
};

__device__ inline std::int64_t out_offset(const MergePart& part, const MergeRow& row) {
  return row.batch * part.out_strides[0] + row.token * part.out_strides[1] +
         row.head * part.out_strides[2];
}

__device__ inline std::int64_t lse_offset(const MergePart& part, const MergeRow& row) {
  return row.batch * part.lse_strides[0] + row.head * part.lse_strides[1] +
         row.token * part.lse_strides[2];
}

__device__ inline double lse_of(const MergePart& part, const MergeRow& row) {
  return load_element<double>(part.lse, part.lse_dtype, lse_offset(part, row));
}

/// What the parts' weights are relative to, and their sum.
struct Denominator {
  bool saw_something = false;
  double maximum = -INFINITY;
  double sum = 0;

  /// NaN where a part's is; -inf where no part saw a key.
  __device__ double lse() const { return saw_something ? maximum + log(sum) : -INFINITY; }
};

__device__ inline Denominator denominator_of(const MergeKernelParams& params, const MergeRow& row) {
  Denominator result;
  for (std::int64_t n = 0; n < params.num_parts; ++n) {
    const double lse = lse_of(params.parts[n], row);
    result.saw_something = result.saw_something || lse != -INFINITY;
    if (lse > result.maximum) result.maximum = lse;
  }
  if (!result.saw_something) return result;
  if (params.sinks.data != nullptr) {
    const double sink =
        load_element<double>(params.sinks.data, params.sinks.dtype, row.head * params.sinks.stride);
    if (sink > result.maximum) result.maximum = sink;
    result.sum = exp(sink - result.maximum);
  }
  for (std::int64_t n = 0; n < params.num_parts; ++n) {
    const double lse = lse_of(params.parts[n], row);
    if (lse != -INFINITY) result.sum += exp(lse - result.maximum);
  }
  return result;
}

/// The columns first, first + 32, ... of a row.
__device__ inline void merge_columns(const MergeKernelParams& params, const MergeRow& row,
                                     const Denominator& denominator, std::int64_t first) {
  double sums[kColumns] = {};
  for (std::int64_t n = 0; n < params.num_parts && denominator.saw_something; ++n) {
    const MergePart part = params.parts[n];
    const double lse = lse_of(part, row);
    if (lse == -INFINITY) continue;  // its row may hold anything
    const double weight = exp(lse - denominator.maximum);
    const std::int64_t start = out_offset(part, row);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const std::int64_t i = first + c * kWarp;
      if (i < params.value_dim) {
        sums[c] += weight * load_element<double>(part.out, part.out_dtype, start + i);
      }
    }
  }
  const std::int64_t start = out_offset(params.result, row);
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    const std::int64_t i = first + c * kWarp;
    if (i >= params.value_dim) break;
    store_element(const_cast<void*>(params.result.out), params.result.out_dtype, start + i,
                  denominator.saw_something ? sums[c] / denominator.sum : 0.0);
  }
}

__global__ void __launch_bounds__(kThreads)
    merge_rows(const __grid_constant__ MergeKernelParams params) {
  const std::int64_t rows = params.batch * params.query_len * params.num_heads;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const std::int64_t warps = std::int64_t{gridDim.x} * (kThreads / kWarp);
  for (std::int64_t index = std::int64_t{blockIdx.x} * (kThreads / kWarp) + threadIdx.x / kWarp;
       index < rows; index += warps) {
    const MergeRow row{index / params.num_heads / params.query_len,
                       index / params.num_heads % params.query_len, index % params.num_heads};
    const Denominator denominator = denominator_of(params, row);
    for (std::int64_t i = lane; i < params.value_dim; i += kColumns * kWarp) {
      merge_columns(params, row, denominator, i);
    }
    if (params.result.lse != nullptr && lane == 0) {
      store_element(const_cast<void*>(params.result.lse), params.result.lse_dtype,
                    lse_offset(params.result, row), denominator.lse());
    }
  }
}

}  // namespace

void merge(Queue& queue, const MergeParams& params) {
  const ListForKernel<MergePart, kShortList> parts(queue, params.parts);
  const std::int64_t rows = params.batch * params.query_len * params.num_heads;
  queue.launch(merge_rows, Grid{blocks_for(rows, kThreads / kWarp), kThreads},
               MergeKernelParams{.batch = params.batch,
                                 .query_len = params.query_len,
                                 .num_heads = params.num_heads,
                                 .value_dim = params.value_dim,
                                 .result = params.result,
                                 .sinks = params.sinks,
                                 .num_parts = static_cast<std::int64_t>(params.parts.size()),
                                 .parts = parts.list()});
}

}  // namespace ladon::cuda
