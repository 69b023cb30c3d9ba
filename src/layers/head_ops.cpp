// Heads repeated, split and merged: each is one copy() or one view with other strides.
#include "ladon/head_ops.h"

#include <string>

#include "core/checks.h"
#include "core/fail.h"

namespace ladon {
namespace {

template <class Element>
detail::BasicView<Element> split(const detail::BasicView<Element>& x, std::int64_t num_heads) {
  // A view alone: whatever device it is on.
  check_view(Operation("split_heads", x.device()), {"x", x}, 3);
  if (num_heads < 1) {
    fail("split_heads", "num_heads", "got " + std::to_string(num_heads) + ", expected 1 or more");
  }
  const std::int64_t width = x.size(2);
  if (width % num_heads != 0) {
    fail("split_heads", "num_heads",
         "got " + std::to_string(num_heads) + ", expected a divisor of x's width, which is " +
             std::to_string(width));
  }
  const std::int64_t dim = width / num_heads;
  return {x.data(),
          x.dtype(),
          {x.size(0), x.size(1), num_heads, dim},
          {x.stride(0), x.stride(1), dim, 1},
          x.device()};
}

}  // namespace

Tensor repeat_kv(const Context& context, const ConstTensorView& x, std::int64_t times) {
  check_strided_view(Operation("repeat_kv", context), {"x", x}, 4);
  std::int64_t heads = 0;
  if (times < 1 || __builtin_mul_overflow(x.size(2), times, &heads)) {
    fail("repeat_kv", "times",
         "got " + std::to_string(times) + " for " + std::to_string(x.size(2)) +
             " heads, expected 1 or more, and a product that fits 64 bits");
  }
  Tensor result =
      Tensor::uninitialized(context, x.dtype(), {x.size(0), x.size(1), heads, x.size(3)});
  const Dims shape{x.size(0), x.size(1), x.size(2), times, x.size(3)};
  // A dimension of stride 0 repeats each head, and copy() does the rest.
  const ConstTensorView repeated(x.data(), x.dtype(), shape,
                                 {x.stride(0), x.stride(1), x.stride(2), 0, x.stride(3)},
                                 x.device());
  copy(context, repeated, result.view().reshape(shape));
  return result;
}

ConstTensorView split_heads(const ConstTensorView& x, std::int64_t num_heads) {
  return split(x, num_heads);
}

TensorView split_heads(const TensorView& x, std::int64_t num_heads) { return split(x, num_heads); }

Tensor merge_heads(const Context& context, const ConstTensorView& x) {
  check_strided_view(Operation("merge_heads", context), {"x", x}, 4);
  Tensor result =
      Tensor::uninitialized(context, x.dtype(), {x.size(0), x.size(1), x.size(2) * x.size(3)});
  copy(context, x, result.view().reshape(x.shape()));
  return result;
}

}  // namespace ladon
