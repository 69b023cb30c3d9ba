#include "layers/projection.h"

#include "core/context_impl.h"

namespace ladon {

Matrix matrix_of(const ConstTensorView& view) {
  if (view.absent()) return {};
  // One struct serves inputs and outputs.
  return {const_cast<void*>(view.data()), view.dtype(), view.rank() == 1 ? 0 : view.stride(0)};
}

void project(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
             const ConstTensorView& b, const TensorView& y, const HeadSteps& steps) {
  backend_of(context).project({.rows = x.size(0),
                               .in_features = x.size(1),
                               .out_features = w.size(0),
                               .steps = steps,
                               .x = matrix_of(x),
                               .w = matrix_of(w),
                               .b = matrix_of(b),
                               .y = matrix_of(y)});
}

void add_input_gradient(const Context& context, const ConstTensorView& dy, const ConstTensorView& w,
                        const TensorView& dx, const HeadSteps& steps) {
  backend_of(context).project_input_gradient({.rows = dy.size(0),
                                              .in_features = w.size(1),
                                              .out_features = w.size(0),
                                              .steps = steps,
                                              .w = matrix_of(w),
                                              .y = matrix_of(dy),
                                              .dx = matrix_of(dx)});
}

void add_weight_gradient(const Context& context, const ConstTensorView& x,
                         const ConstTensorView& dy, const TensorView& dw, const TensorView& db) {
  backend_of(context).project_weight_gradient({.rows = x.size(0),
                                               .in_features = x.size(1),
                                               .out_features = dy.size(1),
                                               .x = matrix_of(x),
                                               .y = matrix_of(dy),
                                               .dw = matrix_of(dw),
                                               .db = matrix_of(db)});
}

}  // namespace ladon
