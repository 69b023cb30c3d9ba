// RMS norm of rows, y = x * (weight + offset) / sqrt(mean(x^2) + epsilon), or layer norm, which is
// that of x less its mean and is computed in double throughout.
//
// A row belongs to 1 to 256 threads of a block of 256, a chunk of 8 elements each, and is read
// twice: for the sum of its squares, and (from L1 or L2) to be scaled. Sums are in double; the
// products of f32 and narrower rows are two floats each, as good as double to the last rounding but
// without its conversions, of which a multiprocessor makes only 16 a cycle.
//
// Per element: 2 f64 operations, 8 f32 ones; x once from memory, y once to it. The limit is memory.

#include <cstdint>

#include "cuda/kernels/dependent_launch.cuh"
#include "cuda/kernels/norm.cuh"
#include "cuda/operations.h"

namespace ladon::cuda {
namespace {

struct NormForwardParams {
  NormParams norm;
  double inverse_dim;
};

/// high + low, rounded to odd where the result is rounded once more.
__device__ inline float sum_to_odd(float high, float low) {
  const float sum = high + low;
  const float error = low - (sum - high);
  const int bits = __float_as_int(sum);
  if (error == 0 || (bits & 1) != 0) return sum;
  return __int_as_float((error > 0) == (sum > 0) ? bits + 1 : bits - 1);
}

/// What a row is multiplied with.
template <class Compute>
class RowFactor;

template <>
class RowFactor<double> {
 public:
  __device__ explicit RowFactor(double factor) : factor_(factor) {}
  __device__ double scaled(double x, double weight, double offset, bool) const {
    return x * factor_ * (weight + offset);
  }

 private:
  double factor_;
};

/// A power of two, which keeps any factor and product in range, times a sum of two floats.
template <>
class RowFactor<float> {
 public:
  __device__ explicit RowFactor(double factor) {
    const int exponent = ((__double2hiint(factor) >> 20) & 0x7ff) - 1023;
    const int limited = min(max(exponent, -126), 127);
    power_ = __int_as_float((limited + 127) << 23);
    const double mantissa = factor * __hiloint2double((1023 - limited) << 20, 0);
    high_ = static_cast<float>(mantissa);
    low_ = static_cast<float>(mantissa - static_cast<double>(high_));
  }

  /// x * factor * (weight + offset), rounded once; to odd where a rounding to 16 bits follows.
  __device__ float scaled(float x, float weight, float offset, bool to_odd) const {
    const float gain = weight + offset;
    const float added = gain - weight;
    const float gain_error = (weight - (gain - added)) + (offset - added);
    const float in_range = x * power_;
    const float unit = in_range * high_;
    const float unit_error = fmaf(in_range, low_, fmaf(in_range, high_, -unit));
    const float product = unit * gain;
    const float product_error =
        fmaf(unit, gain_error, fmaf(unit_error, gain, fmaf(unit, gain, -product)));
    if (product_error == 0 || !isfinite(product)) return product;  // also -0
    return to_odd ? sum_to_odd(product, product_error) : product + product_error;
  }

 private:
  float power_;
  float high_;
  float low_;
};

template <class Compute>
__global__ void __launch_bounds__(kThreads, 4)
    normalise_rows(const __grid_constant__ NormForwardParams params) {
  take_over();
  const NormParams& norm = params.norm;
  const NormLane lane(norm.dim);
  constexpr bool kIsWide = sizeof(Compute) == sizeof(double);
  const bool to_odd = size_of(norm.y.dtype) == 2;
  const auto offset = static_cast<Compute>(norm.weight_offset);
  const std::int64_t rows_at_once = kThreads / lane.threads;
  for (std::int64_t first = blockIdx.x * rows_at_once; first < norm.rows;
       first += gridDim.x * rows_at_once) {
    const std::int64_t row = first + lane.group;
    // Layer norms are computed in double: floats need no center.
    Compute center = 0;
    if constexpr (kIsWide) center = center_of_row(norm, lane, row, row < norm.rows);
    double squares = 0;
    if (row < norm.rows) {
      for_each_chunk(lane, norm.dim, [&](std::int64_t i, int count) {
        const Chunk<Compute> x = load_chunk<Compute>(norm.x, row, i, count);
#pragma unroll
        for (int n = 0; n < kChunk; ++n) {
          const double value = kIsWide && n >= count ? 0 : x.values[n] - center;
          squares = fma(value, value, squares);
        }
      });
    }
    squares = sum_of_threads(squares, lane.threads);
    if (row >= norm.rows) continue;
    const RowFactor<Compute> factor(rsqrt(fma(squares, params.inverse_dim, norm.epsilon)));
    for_each_chunk(lane, norm.dim, [&](std::int64_t i, int count) {
      Chunk<Compute> x = load_chunk<Compute>(norm.x, row, i, count);
      const Chunk<Compute> weight =
          load_chunk<Compute>(norm.weight, row % norm.weight_rows, i, count);
#pragma unroll
      for (int n = 0; n < kChunk; ++n) {
        x.values[n] = factor.scaled(x.values[n] - center, weight.values[n], offset, to_odd);
      }
      store_chunk(norm.y, row, i, count, x);
    });
  }
}

}  // namespace

void rms_norm(Queue& queue, const NormParams& params) {
  if (params.rows == 0 || params.dim == 0) return;
  const Grid grid{.blocks = blocks_for(params.rows, kThreads / threads_per_row(params.dim)),
                  .threads = kThreads,
                  .starts_early = true};
  const NormForwardParams forward{params, 1 / static_cast<double>(params.dim)};
  const bool wide = params.x.dtype == DType::kF64 || params.weight.dtype == DType::kF64 ||
                    params.y.dtype == DType::kF64 || params.centered;
  queue.launch(wide ? normalise_rows<double> : normalise_rows<float>, grid, forward);
}

}  // namespace ladon::cuda
