#include "ladon/parameter.h"

#include <string>
#include <utility>

#include "core/checks.h"
#include "core/fail.h"

namespace ladon {

Parameter Parameter::zeros(std::string name, DType dtype, const Dims& shape) {
  if (!is_float(dtype)) {
    fail("Parameter::zeros", "dtype",
         std::string("got ") + name_of(dtype) + ", expected f64, f32, f16 or bf16");
  }
  check_no_negative_size("Parameter::zeros", "shape", shape);
  const DType gradient_dtype = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  return {std::move(name), Tensor(dtype, shape), Tensor(gradient_dtype, shape)};
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
