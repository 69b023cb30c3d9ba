#include "reference/projection_reference.h"

#include "core/element.h"

namespace ladon::reference {
namespace {

double element(const Matrix& matrix, std::int64_t row, std::int64_t column) {
  return load_element(matrix.data, matrix.dtype, row * matrix.stride + column);
}

void add(const Matrix& matrix, std::int64_t row, std::int64_t column, double value) {
  store_element(matrix.data, matrix.dtype, row * matrix.stride + column,
                element(matrix, row, column) + value);
}

}  // namespace

void project_row(const ProjectionParams& params, std::int64_t row) {
  for (std::int64_t out = 0; out < params.out_features; ++out) {
    double sum = 0;
    for (std::int64_t in = 0; in < params.in_features; ++in) {
      sum += element(params.x, row, in) * element(params.w, out, in);
    }
    if (params.b.data != nullptr) sum += element(params.b, 0, out);
    store_element(params.y.data, params.y.dtype, row * params.y.stride + out, sum);
  }
}

void project_input_gradient_row(const ProjectionParams& params, std::int64_t row) {
  for (std::int64_t in = 0; in < params.in_features; ++in) {
    double sum = 0;
    for (std::int64_t out = 0; out < params.out_features; ++out) {
      sum += element(params.y, row, out) * element(params.w, out, in);
    }
    add(params.dx, row, in, sum);
  }
}

void project_weight_gradient_row(const ProjectionParams& params, std::int64_t out) {
  for (std::int64_t in = 0; in < params.in_features; ++in) {
    double sum = 0;
    for (std::int64_t row = 0; row < params.rows; ++row) {
      sum += element(params.y, row, out) * element(params.x, row, in);
    }
    add(params.dw, out, in, sum);
  }
  if (params.db.data == nullptr) return;
  double sum = 0;
  for (std::int64_t row = 0; row < params.rows; ++row) sum += element(params.y, row, out);
  add(params.db, 0, out, sum);
}

}  // namespace ladon::reference
