// y = x * (weight + offset) / sqrt(mean(x^2) + epsilon), row by row and in order, everything in
// double.

#include <cmath>
#include <vector>

#include "core/element.h"
#include "reference/backend.h"

namespace ladon::reference {
namespace {

double element(const Matrix& matrix, std::int64_t row, std::int64_t i) {
  return load_element(matrix.data, matrix.dtype, row * matrix.stride + i);
}

double weight_at(const NormParams& params, std::int64_t i) {
  return element(params.weight, 0, i) + params.weight_offset;
}

double inverse_rms(const NormParams& params, std::int64_t row) {
  double sum = 0;
  for (std::int64_t i = 0; i < params.dim; ++i) {
    const double value = element(params.x, row, i);
    sum += value * value;
  }
  return 1 / std::sqrt(sum / static_cast<double>(params.dim) + params.epsilon);
}

}  // namespace

void ReferenceBackend::rms_norm(const NormParams& params) {
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const double factor = inverse_rms(params, row);
    for (std::int64_t i = 0; i < params.dim; ++i) {
      store_element(params.y.data, params.y.dtype, row * params.y.stride + i,
                    element(params.x, row, i) * factor * weight_at(params, i));
    }
  }
}

void ReferenceBackend::rms_norm_backward(const NormParams& params) {
  std::vector<double> sums(static_cast<std::size_t>(params.dim));
  for (std::int64_t row = 0; row < params.rows; ++row) {
    const double factor = inverse_rms(params, row);
    double dot = 0;  // of the normalised x with its gradient
    for (std::int64_t i = 0; i < params.dim; ++i) {
      const double unit = element(params.x, row, i) * factor;
      const double gradient = element(params.dy, row, i);
      dot += unit * gradient * weight_at(params, i);
      sums[static_cast<std::size_t>(i)] += unit * gradient;
    }
    dot /= static_cast<double>(params.dim);
    for (std::int64_t i = 0; i < params.dim; ++i) {
      const double unit = element(params.x, row, i) * factor;
      const double gradient = element(params.dy, row, i) * weight_at(params, i);
      store_element(params.dx.data, params.dx.dtype, row * params.dx.stride + i,
                    factor * (gradient - unit * dot));
    }
  }
  for (std::int64_t i = 0; i < params.dim; ++i) {
    store_element(params.dweight.data, params.dweight.dtype, i,
                  element(params.dweight, 0, i) + sums[static_cast<std::size_t>(i)]);
  }
}

}  // namespace ladon::reference
