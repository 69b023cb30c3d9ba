#include "ladon/parameter.h"

#include <string>
#include <utility>

#include "core/checks.h"
#include "core/compute_dtype.h"
#include "core/context_impl.h"
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
  parameter.gradient = Tensor(compute_dtype(dtype), shape);
  return parameter;
}

void Parameter::make_gradient(const Context& context) {
  if (!gradient.view().absent()) return;
  check_device(Operation("Parameter::make_gradient", context), {"value", value});
  gradient = Tensor(context, compute_dtype(value.dtype()), value.shape());
}

void Parameter::zero_gradient(const Context& context) {
  check_device(Operation("Parameter::zero_gradient", context), {"gradient", gradient});
  if (gradient.num_elements() != 0) backend_of(context).zero(gradient);
}

Parameter Parameter::copy() const { return {name, value.clone(), gradient.clone(), generation}; }

Parameter Parameter::to(const Context& context) const {
  return {name, value.to(context), gradient.to(context), generation};
}

}  // namespace ladon
