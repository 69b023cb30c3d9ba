// The smaller kernels of projections' gradients: bias gradients, sums of splits, and f32 gradients
// in bf16 parts. All are limited by memory bandwidth.
#include <cstdint>

#include "cuda/kernels/projection_product.cuh"

namespace ladon::cuda::projection {
namespace {

// ---- db += sum of dy's rows. A block has 32 columns; its warps share the rows. -----------------

constexpr int kSumWarps = 16;

/// Sums of up to 64 rows in the compute type, then in double: no chain of roundings is long.
template <class Compute>
__device__ inline double sum_column(const Matrix& dy, std::int64_t column, std::int64_t rows,
                                    std::int64_t first_row) {
  constexpr int kChunk = 64;
  constexpr int kUnroll = 8;
  double total = 0;
  with_storage_type(dy.dtype, [&](auto zero) {
    using Element = decltype(zero);
    const auto* const data = static_cast<const Element*>(dy.data) + column;
    for (std::int64_t chunk = first_row; chunk < rows; chunk += kChunk * kSumWarps) {
      Compute sum = 0;
      for (int i = 0; i < kChunk; i += kUnroll) {
        Compute values[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          const std::int64_t row = chunk + (i + u) * kSumWarps;
          values[u] = row < rows ? upconvert<Compute>(data[row * dy.stride]) : Compute{0};
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) sum += values[u];
      }
      total += static_cast<double>(sum);
    }
  });
  return total;
}

__global__ void __launch_bounds__(32 * kSumWarps)
    add_column_sums(const __grid_constant__ ProjectionParams params) {
  __shared__ double sums[kSumWarps][32];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const std::int64_t column = static_cast<std::int64_t>(blockIdx.x) * 32 + lane;
  const Matrix& dy = params.y;
  double sum = 0;
  if (column < params.out_features) {
    sum = dy.dtype == DType::kF64 ? sum_column<double>(dy, column, params.rows, warp)
                                  : sum_column<float>(dy, column, params.rows, warp);
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= params.out_features) return;
  for (int w = 1; w < kSumWarps; ++w) sum += sums[w][lane];
  store_element(params.db.data, params.db.dtype, column,
                load_element<double>(params.db.data, params.db.dtype, column) + sum);
}

// ---- c += the splits' partial sums, in ascending order. One thread an element. -----------------

struct PartialSums {
  std::int64_t m;
  std::int64_t n;
  std::int64_t splits;
  ProductResult partials;
  ProductResult c;
};

constexpr int kElementThreads = 256;

template <class Compute>
__global__ void __launch_bounds__(kElementThreads)
    add_partials(const __grid_constant__ PartialSums params) {
  const std::int64_t element =
      static_cast<std::int64_t>(blockIdx.x) * kElementThreads + threadIdx.x;
  if (element >= params.m * params.n) return;
  const std::int64_t row = element / params.n;
  const std::int64_t column = element % params.n;
  const auto* const partials =
      static_cast<const Compute*>(params.partials.data) + row * params.partials.stride + column;
  Compute sum = 0;
  for (std::int64_t split = 0; split < params.splits; ++split) {
    sum += partials[split * params.partials.split_step];
  }
  static_cast<Compute*>(params.c.data)[row * params.c.stride + column] += sum;
}

// ---- one of three bf16 parts of f32 elements. A block has some columns of one row. -------------

constexpr int kPartColumns = 4 * kElementThreads;

/// Truncates to the upper 16 bits, which never overflows; NaN stays NaN.
__device__ inline float truncated(float x) {
  return isnan(x) ? x : __uint_as_float(__float_as_uint(x) & 0xffff0000U);
}

__device__ inline float bf16_part(float x, int part) {
  const float high = truncated(x);
  if (part == 0) return high;
  if (!isfinite(x)) return 0;
  const float middle = truncated(x - high);
  return part == 1 ? middle : x - high - middle;
}

__global__ void __launch_bounds__(kElementThreads)
    write_bf16_part(const __grid_constant__ Bf16Part params) {
  const std::int64_t blocks_per_row = ceil_div(params.to_stride, kPartColumns);
  const std::int64_t row = blockIdx.x / blocks_per_row;
  const std::int64_t first = blockIdx.x % blocks_per_row * kPartColumns + threadIdx.x;
  const float* const from = params.from + row * params.from_stride;
  __nv_bfloat16* const to = params.to + row * params.to_stride;
#pragma unroll
  for (int i = 0; i < kPartColumns / kElementThreads; ++i) {
    const std::int64_t column = first + i * kElementThreads;
    const float x = column < params.columns ? from[column] : 0;
    if (column < params.to_stride) to[column] = __float2bfloat16_rn(bf16_part(x, params.part));
  }
}

}  // namespace

void launch_bias_gradient(Queue& queue, const ProjectionParams& params) {
  queue.launch(add_column_sums,
               {.blocks = dim3(static_cast<unsigned>(ceil_div(params.out_features, 32))),
                .threads = dim3(32 * kSumWarps)},
               params);
}

void launch_add_partials(Queue& queue, const Product& product, const ProductResult& c) {
  const auto blocks = static_cast<unsigned>(ceil_div(product.m * product.n, kElementThreads));
  const Grid grid{.blocks = dim3(blocks), .threads = dim3(kElementThreads)};
  const PartialSums params{product.m, product.n, product.splits, product.c, c};
  if (c.dtype == DType::kF64) {
    queue.launch(add_partials<double>, grid, params);
  } else {
    queue.launch(add_partials<float>, grid, params);
  }
}

void launch_bf16_part(Queue& queue, const Bf16Part& params) {
  const std::int64_t blocks = params.rows * ceil_div(params.to_stride, kPartColumns);
  queue.launch(write_bf16_part,
               {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = dim3(kElementThreads)},
               params);
}

}  // namespace ladon::cuda::projection
