#include "convert/matrices.h"

#include "core/fail.h"
#include "layers/projection.h"

namespace ladon::convert {

TensorView view_of(RealMatrix& matrix) {
  return {matrix.data(), DType::kF64, {matrix.rows(), matrix.cols()}};
}

ConstTensorView view_of(const RealMatrix& matrix) {
  return {matrix.data(), DType::kF64, {matrix.rows(), matrix.cols()}};
}

RealMatrix to_matrix(const Context& host, const ConstTensorView& view) {
  RealMatrix matrix(view.size(0), view.rank() == 1 ? 1 : view.size(1));
  copy(host, view, view_of(matrix).reshape(view.shape()));
  return matrix;
}

RealMatrix read_parameter(const Context& host, const AttentionLayer& layer, std::string_view name) {
  const Parameter& parameter = layer.parameter(name);
  if (parameter.value.device().is_cpu()) return to_matrix(host, parameter.value);
  return to_matrix(host, parameter.value.to_host());
}

void require_finite(std::string_view operation, const Context& host, const AttentionLayer& layer) {
  for (const Parameter& parameter : layer.named_parameters()) {
    if (read_parameter(host, layer, parameter.name).allFinite()) continue;
    fail(operation, "layer", "got numbers in " + parameter.name + " that are not finite");
  }
}

RealMatrix read_affine(const Context& host, const AttentionLayer& layer, const std::string& name) {
  const RealMatrix weight = read_parameter(host, layer, name + ".weight");
  RealMatrix affine = RealMatrix::Zero(weight.rows(), weight.cols() + 1);
  affine.leftCols(weight.cols()) = weight;
  if (layer.has_parameter(name + ".bias")) {
    affine.col(weight.cols()) = read_parameter(host, layer, name + ".bias");
  }
  return affine;
}

void write_parameter(const Context& host, AttentionLayer& layer, std::string_view name,
                     const RealMatrix& matrix) {
  layer.set_parameter(host, name, view_of(matrix).reshape(layer.parameter(name).value.shape()));
}

void write_affine(const Context& host, AttentionLayer& layer, const std::string& name,
                  const RealMatrix& matrix) {
  write_parameter(host, layer, name + ".weight", matrix.leftCols(matrix.cols() - 1));
  if (layer.has_parameter(name + ".bias")) {
    write_parameter(host, layer, name + ".bias", matrix.rightCols(1));
  }
}

void copy_parameter(const Context& host, const AttentionLayer& from, AttentionLayer& to,
                    std::string_view name) {
  to.set_parameter(host, name, from.parameter(name).value.to_host());
}

RealMatrix times(const Context& host, const RealMatrix& a, const RealMatrix& b) {
  RealMatrix product = RealMatrix::Zero(a.rows(), b.cols());
  if (product.size() == 0 || a.cols() == 0) return product;
  add_input_gradient(host, view_of(a), view_of(b), view_of(product));
  return product;
}

RealMatrix times_transposed(const Context& host, const RealMatrix& a, const RealMatrix& b) {
  RealMatrix product = RealMatrix::Zero(a.rows(), b.rows());
  if (product.size() == 0 || a.cols() == 0) return product;
  project(host, view_of(a), view_of(b), {}, view_of(product));
  return product;
}

RealMatrix second_moment(const Context& host, const RealMatrix& a, const RealMatrix& moments) {
  const RealMatrix product = moments.size() == 0
                                 ? times_transposed(host, a, a)
                                 : times_transposed(host, times_transposed(host, a, moments), a);
  return 0.5 * (product + product.transpose());
}

}  // namespace ladon::convert
