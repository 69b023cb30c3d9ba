// Tensors of tokens seen as rows, which is how projections take them.
#pragma once

#include <cstdint>

#include "ladon/context.h"
#include "ladon/tensor.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// [batch, seq, width] or [seq, width] as [rows, width], where the sequences follow each other in
/// memory; absent where they do not.
template <class View>
View as_rows(const View& x) {
  if (x.rank() == 2) return x;
  const std::int64_t rows = x.size(0) * x.size(1);
  if (x.size(0) > 1 && x.size(1) > 1 && x.stride(0) != x.size(1) * x.stride(1)) return {};
  return {x.data(),
          x.dtype(),
          {rows, x.size(2)},
          {x.size(1) > 1 ? x.stride(1) : x.stride(0), 1},
          x.device()};
}

/// An input as [rows, width]: in place where its batches follow each other, else copied.
class InputRows {
 public:
  InputRows(const Context& context, const ConstTensorView& x);
  const ConstTensorView& view() const noexcept { return view_; }

 private:
  Tensor copy_;
  ConstTensorView view_;
};

/// [batch, seq, width] as [batch * seq, width].
TensorView rows_of(Tensor& tensor);
ConstTensorView rows_of(const Tensor& tensor);
/// [batch, seq, heads, dim] as [batch * seq, heads * dim].
TensorView merged(Tensor& tensor);
ConstTensorView merged(const Tensor& tensor);
/// [seq, width] as [1, seq, width]; what has a batch stays as it is.
ConstTensorView with_batch(const ConstTensorView& x);
/// [1, seq, width] as a new tensor [seq, width].
Tensor without_batch(const Context& context, const Tensor& tensor);

}  // namespace ladon
