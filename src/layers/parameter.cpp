#include "ladon/parameter.h"

#include <cstddef>
#include <cstring>
#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"

namespace ladon {

Parameter Parameter::zeros_without_gradient(std::string name, DType dtype, const Dims& shape) {
  if (!is_float(dtype)) {
    fail("Parameter::zeros", "dtype",
         std::string("got ") + name_of(dtype) + ", expected f64, f32, f16 or bf16");
  }
  check_no_negative_size("Parameter::zeros", "shape", shape);
  Parameter parameter;
  parameter.name = std::move(name);
  parameter.value = Tensor(dtype, shape);
  return parameter;
}

Parameter Parameter::zeros(std::string name, DType dtype, const Dims& shape) {
  Parameter parameter = zeros_without_gradient(std::move(name), dtype, shape);
  parameter.make_gradient();
  return parameter;
}

void Parameter::make_gradient() {
  if (!gradient.view().absent()) return;
  gradient = Tensor(value.dtype() == DType::kF64 ? DType::kF64 : DType::kF32, value.shape());
}

void Parameter::zero_gradient() noexcept {
  if (gradient.data() == nullptr) return;  // absent, or without elements
  std::memset(gradient.data(), 0,
              static_cast<std::size_t>(gradient.num_elements()) * size_of(gradient.dtype()));
}

Parameter Parameter::copy() const {
  Parameter result;
  result.name = name;
  // A tensor that is not there is copied as such.
  if (!value.view().absent()) result.value = Tensor::copy_of(value);
  if (!gradient.view().absent()) result.gradient = Tensor::copy_of(gradient);
  return result;
}

}  // namespace ladon
