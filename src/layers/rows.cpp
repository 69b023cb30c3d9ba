#include "layers/rows.h"

namespace ladon {

InputRows::InputRows(const Context& context, const ConstTensorView& x) : view_(as_rows(x)) {
  if (!view_.absent()) return;
  copy_ = Tensor::copy_of(context, x);
  view_ = as_rows(ConstTensorView(copy_));
}

TensorView rows_of(Tensor& tensor) {
  const std::int64_t width = tensor.size(tensor.rank() - 1);
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), width});
}

ConstTensorView rows_of(const Tensor& tensor) { return rows_of(const_cast<Tensor&>(tensor)); }

TensorView merged(Tensor& tensor) {
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), tensor.size(2) * tensor.size(3)});
}
ConstTensorView merged(const Tensor& tensor) {
  return tensor.view().reshape({tensor.size(0) * tensor.size(1), tensor.size(2) * tensor.size(3)});
}

ConstTensorView with_batch(const ConstTensorView& x) {
  if (x.rank() == 3) return x;
  return {
      x.data(), x.dtype(), {1, x.size(0), x.size(1)}, {0, x.stride(0), x.stride(1)}, x.device()};
}

Tensor without_batch(const Context& context, const Tensor& tensor) {
  return Tensor::copy_of(context, tensor.view().select(0, 0));
}

}  // namespace ladon
