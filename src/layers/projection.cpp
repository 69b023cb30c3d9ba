#include "layers/projection.h"

#include <algorithm>
#include <array>

#include "core/context_impl.h"

namespace ladon {

Matrix matrix_of(const ConstTensorView& view) {
  if (view.absent()) return {};
  // One struct serves inputs and outputs.
  return {const_cast<void*>(view.data()), view.dtype(), view.rank() == 1 ? 0 : view.stride(0)};
}

namespace {

ProjectionParams params_of(const Projection& projection, const HeadSteps& steps) {
  return {.rows = projection.x.size(0),
          .in_features = projection.x.size(1),
          .out_features = projection.w.size(0),
          .steps = steps,
          .x = matrix_of(projection.x),
          .w = matrix_of(projection.w),
          .b = matrix_of(projection.b),
          .y = matrix_of(projection.y)};
}

}  // namespace

void project(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
             const ConstTensorView& b, const TensorView& y, const HeadSteps& steps) {
  backend_of(context).project(params_of({x, w, b, y}, steps));
}

void project_all(const Context& context, std::span<const Projection> projections) {
  constexpr std::size_t kAtOnce = 4;
  std::array<ProjectionParams, kAtOnce> params;
  for (; !projections.empty();
       projections = projections.subspan(std::min(projections.size(), kAtOnce))) {
    const std::size_t count = std::min(projections.size(), kAtOnce);
    for (std::size_t i = 0; i < count; ++i) params[i] = params_of(projections[i], {});
    backend_of(context).project_all({params.data(), count});
  }
}

namespace {

ProjectionParams input_gradient_of(const GradientTerm& term, const TensorView& dx) {
  return {.rows = term.dy.size(0),
          .in_features = term.w.size(1),
          .out_features = term.w.size(0),
          .w = matrix_of(term.w),
          .y = matrix_of(term.dy),
          .dx = matrix_of(dx)};
}

}  // namespace

void add_input_gradient(const Context& context, const ConstTensorView& dy, const ConstTensorView& w,
                        const TensorView& dx, const HeadSteps& steps) {
  ProjectionParams params = input_gradient_of({dy, w}, dx);
  params.steps = steps;
  backend_of(context).project_input_gradient(params);
}

void sum_input_gradients(const Context& context, std::span<const GradientTerm> terms,
                         const TensorView& dx) {
  std::array<ProjectionParams, 3> params;
  for (std::size_t i = 0; i < terms.size(); ++i) params.at(i) = input_gradient_of(terms[i], dx);
  backend_of(context).project_input_gradients({params.data(), terms.size()});
}

namespace {

ProjectionParams weight_gradient_of(const WeightGradient& gradient) {
  return {.rows = gradient.x.size(0),
          .in_features = gradient.x.size(1),
          .out_features = gradient.dy.size(1),
          .x = matrix_of(gradient.x),
          .y = matrix_of(gradient.dy),
          .dw = matrix_of(gradient.dw),
          .db = matrix_of(gradient.db)};
}

}  // namespace

void add_weight_gradient(const Context& context, const ConstTensorView& x,
                         const ConstTensorView& dy, const TensorView& dw, const TensorView& db) {
  backend_of(context).project_weight_gradient(weight_gradient_of({x, dy, dw, db}));
}

void add_weight_gradients(const Context& context, std::span<const WeightGradient> gradients) {
  std::array<ProjectionParams, 3> params;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    params.at(i) = weight_gradient_of(gradients[i]);
  }
  backend_of(context).project_weight_gradients({params.data(), gradients.size()});
}

}  // namespace ladon
