// RMS norm of rows, y = x * weight / sqrt(mean(x^2) + epsilon), or layer norm, which is that of x
// less its mean; and their backward.
//
// Everything is computed in double and rounded once: an element costs two products and a conversion
// each way, and is read from memory once (a row stays in L1 between its two passes). The bound is
// memory: bytes of x and y. Sums run over fixed lanes, so a row's bits depend on that row alone.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/kernels/exact_rows.inl"

namespace ladon::cpu {
namespace {

/// The length to which rows are padded with zeros, for loops over whole vectors.
inline std::int64_t padded_norm_dim(std::int64_t dim) { return round_up(dim, kNormUnit); }

struct NormScratch {
  double* x;   // [padded dim]
  double* dy;  // [padded dim]
  std::size_t bytes;

  NormScratch(const NormParams& params, Scratch base) {
    ScratchArena arena(base);
    x = arena.take<double>(padded_norm_dim(params.dim));
    dy = arena.take<double>(padded_norm_dim(params.dim));
    bytes = arena.used();
  }
};

inline void load_norm_row(const Matrix& matrix, std::int64_t row, std::int64_t dim, double* to) {
  load_row(at(matrix.data, matrix.dtype, row * matrix.stride), matrix.dtype, dim, to);
  for (std::int64_t i = dim; i < padded_norm_dim(dim); ++i) to[i] = 0;
}

/// Sum over i of product(i), a vector of F64 at a time, in four accumulators that alternate.
template <class Product>
inline double sum_over_row(std::int64_t dim, const Product& product) {
  F64 sums[4] = {zero<F64>(), zero<F64>(), zero<F64>(), zero<F64>()};
  for (std::int64_t i = 0; i < padded_norm_dim(dim); i += 4 * F64::kLanes) {
    LADON_UNROLL
    for (int part = 0; part < 4; ++part) {
      sums[part] = sums[part] + product(i + part * F64::kLanes);
    }
  }
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

inline double mean_of_row(std::int64_t dim, const double* x) {
  return sum_over_row(dim, [x](std::int64_t i) { return load<F64>(x + i); }) /
         static_cast<double>(dim);
}

/// A row of x, less its mean in a layer norm.
inline void load_centered_row(const NormParams& params, std::int64_t row, double* x) {
  load_norm_row(params.x, row, params.dim, x);
  if (!params.centered) return;
  const double mean = mean_of_row(params.dim, x);
  for (std::int64_t i = 0; i < params.dim; ++i) x[i] -= mean;
}

inline double inverse_rms(const NormParams& params, const double* x) {
  const double squares = sum_over_row(params.dim, [x](std::int64_t i) {
    const F64 value = load<F64>(x + i);
    return value * value;
  });
  return 1 / __builtin_sqrt(squares / static_cast<double>(params.dim) + params.epsilon);
}

template <class V>
void rms_norm(const NormParams& params, const NormTask& task, Scratch memory) {
  const NormScratch scratch(params, memory);
  for (std::int64_t row = task.begin; row < task.end; ++row) {
    load_centered_row(params, row, scratch.x);
    const double factor = inverse_rms(params, scratch.x);
    const double* const weight = task.weight + row % params.weight_rows * params.dim;
    for (std::int64_t i = 0; i < params.dim; ++i) {
      scratch.x[i] = scratch.x[i] * factor * weight[i];
    }
    store_rounded(scratch.x, params.dim, at(params.y.data, params.y.dtype, row * params.y.stride),
                  params.y.dtype);
  }
}

template <class V>
std::size_t rms_norm_scratch(const NormParams& params) {
  return NormScratch(params, {}).bytes;
}

template <class V>
void rms_norm_backward(const NormParams& params, const NormTask& task, Scratch memory) {
  const NormScratch scratch(params, memory);
  double* const unit = scratch.x;
  double* const dy = scratch.dy;
  for (std::int64_t row = task.begin; row < task.end; ++row) {
    load_centered_row(params, row, unit);
    load_norm_row(params.dy, row, params.dim, dy);
    const double factor = inverse_rms(params, unit);
    const double* const weight = task.weight + row % params.weight_rows * params.dim;
    double* const sums = task.sums + row % params.weight_rows * params.dim;
    for (std::int64_t i = 0; i < params.dim; ++i) {
      unit[i] *= factor;
      sums[i] += unit[i] * dy[i];
      dy[i] *= weight[i];
    }
    // The mean of the normalised x times its gradient.
    const double mean =
        sum_over_row(params.dim,
                     [&](std::int64_t i) { return load<F64>(unit + i) * load<F64>(dy + i); }) /
        static_cast<double>(params.dim);
    // What the subtracted mean takes from every element.
    const double shared = params.centered ? mean_of_row(params.dim, dy) : 0;
    for (std::int64_t i = 0; i < params.dim; ++i) {
      dy[i] = factor * (dy[i] - unit[i] * mean - shared);
    }
    store_rounded(dy, params.dim, at(params.dx.data, params.dx.dtype, row * params.dx.stride),
                  params.dx.dtype);
  }
}

template <class V>
std::size_t rms_norm_backward_scratch(const NormParams& params) {
  return NormScratch(params, {}).bytes;
}

}  // namespace
}  // namespace ladon::cpu
