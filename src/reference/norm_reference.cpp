// y = x * (weight + offset) / sqrt(mean(x^2) + epsilon), row by row and in order, everything in
// double; in a layer norm x is less its mean.

#include <cmath>
#include <vector>

#include "core/element.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

double element(const Matrix& matrix, std::int64_t row, std::int64_t i) {
  return load_element(matrix.data, matrix.dtype, row * matrix.stride + i);
}

double weight_at(const NormParams& params, std::int64_t row, std::int64_t i) {
  return element(params.weight, row % params.weight_rows, i) + params.weight_offset;
}

/// What all elements of a row share.
struct RowScale {
  RowScale(const NormParams& params, std::int64_t row) {
    const auto dim = static_cast<double>(params.dim);
    for (std::int64_t i = 0; params.centered && i < params.dim; ++i) {
      mean += element(params.x, row, i);
    }
    mean /= dim;
    double sum = 0;
    for (std::int64_t i = 0; i < params.dim; ++i) {
      const double value = element(params.x, row, i) - mean;
      sum += value * value;
    }
    factor = 1 / std::sqrt(sum / dim + params.epsilon);
  }
  double unit(double x) const { return (x - mean) * factor; }

  double mean = 0;
  double factor;
};

}  // namespace

void ReferenceBackend::rms_norm(const NormParams& params) {
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const RowScale scale(params, row);
    for (std::int64_t i = 0; i < params.dim; ++i) {
      store_element(params.y.data, params.y.dtype, row * params.y.stride + i,
                    scale.unit(element(params.x, row, i)) * weight_at(params, row, i));
    }
  }
}

void ReferenceBackend::rms_norm_backward(const NormParams& params) {
  std::vector<double> sums(static_cast<std::size_t>(params.weight_rows * params.dim));
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const RowScale scale(params, row);
    double* const row_sums = sums.data() + row % params.weight_rows * params.dim;
    double dot = 0;            // of the normalised x with its gradient
    double gradient_mean = 0;  // of that gradient, where the mean was subtracted
    for (std::int64_t i = 0; i < params.dim; ++i) {
      const double unit = scale.unit(element(params.x, row, i));
      const double gradient = element(params.dy, row, i);
      dot += unit * gradient * weight_at(params, row, i);
      if (params.centered) gradient_mean += gradient * weight_at(params, row, i);
      row_sums[i] += unit * gradient;
    }
    dot /= static_cast<double>(params.dim);
    gradient_mean /= static_cast<double>(params.dim);
    for (std::int64_t i = 0; i < params.dim; ++i) {
      const double unit = scale.unit(element(params.x, row, i));
      const double gradient = element(params.dy, row, i) * weight_at(params, row, i);
      store_element(params.dx.data, params.dx.dtype, row * params.dx.stride + i,
                    scale.factor * (gradient - unit * dot - gradient_mean));
    }
  }
  for (std::int64_t row = 0; row < params.weight_rows; ++row) {
    for (std::int64_t i = 0; i < params.dim; ++i) {
      store_element(
          params.dweight.data, params.dweight.dtype, row * params.dweight.stride + i,
          element(params.dweight, row, i) + sums[static_cast<std::size_t>(row * params.dim + i)]);
    }
  }
}

}  // namespace ladon::reference
