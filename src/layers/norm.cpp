#include "layers/norm.h"

#include "core/context_impl.h"
#include "layers/projection.h"

namespace ladon {
namespace {

/// [..., dim] as rows.
Matrix rows_of_dim(const ConstTensorView& view, std::int64_t dim) {
  return {const_cast<void*>(view.data()), view.dtype(), view.rank() == 2 ? view.stride(0) : dim};
}

NormParams params_of(const ConstTensorView& x, const ConstTensorView& weight,
                     const NormConstants& constants) {
  const std::int64_t dim = weight.size(weight.rank() - 1);
  return {.rows = dim == 0 ? 0 : x.num_elements() / dim,
          .dim = dim,
          .epsilon = constants.epsilon,
          .weight_offset = constants.weight_offset,
          .centered = constants.centered,
          .x = rows_of_dim(x, dim),
          .weight = rows_of_dim(weight, dim),
          .weight_rows = weight.rank() == 2 ? weight.size(0) : 1};
}

}  // namespace

void rms_norm(const Context& context, const ConstTensorView& x, const ConstTensorView& weight,
              const NormConstants& constants, const TensorView& y) {
  NormParams params = params_of(x, weight, constants);
  params.y = rows_of_dim(y, params.dim);
  backend_of(context).rms_norm(params);
}

void rms_norm_backward(const Context& context, const ConstTensorView& x,
                       const ConstTensorView& weight, const NormConstants& constants,
                       const ConstTensorView& dy, const TensorView& dx, const TensorView& dweight) {
  NormParams params = params_of(x, weight, constants);
  params.dy = rows_of_dim(dy, params.dim);
  params.dx = rows_of_dim(dx, params.dim);
  params.dweight = rows_of_dim(dweight, params.dim);
  backend_of(context).rms_norm_backward(params);
}

}  // namespace ladon
