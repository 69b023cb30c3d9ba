// Linear maps y = x W^T + b over the rows of x, and their gradients. The layers check shapes before
// they call these.
#pragma once

#include <span>

#include "core/projection_params.h"
#include "ladon/context.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// A matrix or, as one row, a vector; absent where the view is.
Matrix matrix_of(const ConstTensorView& view);

/// x [rows, in], w [out, in], b [out] or absent, y [rows, out]; last strides 1, any float dtypes. A
/// row's bits do not depend on the other rows or on threads.
void project(const Context& context, const ConstTensorView& x, const ConstTensorView& w,
             const ConstTensorView& b, const TensorView& y, const HeadSteps& steps = {});

/// Several projections, of which none reads what another one writes.
struct Projection {
  ConstTensorView x;
  ConstTensorView w;
  ConstTensorView b;  // or absent
  TensorView y;
};
void project_all(const Context& context, std::span<const Projection> projections);

/// dx += dy W; dx is f64 where w is, else f32.
void add_input_gradient(const Context& context, const ConstTensorView& dy, const ConstTensorView& w,
                        const TensorView& dx, const HeadSteps& steps = {});

/// A projection whose output has gradient dy.
struct GradientTerm {
  ConstTensorView dy;
  ConstTensorView w;
};
/// dx = the sum of dy W over all terms, which are one to three; dx has any float dtype.
void sum_input_gradients(const Context& context, std::span<const GradientTerm> terms,
                         const TensorView& dx);

/// dw += dy^T x and, where db is there, db += sum of dy's rows; both f64 where x is, else f32.
void add_weight_gradient(const Context& context, const ConstTensorView& x,
                         const ConstTensorView& dy, const TensorView& dw, const TensorView& db);

/// Several of them, up to three, none of which writes what another one writes.
struct WeightGradient {
  ConstTensorView x;
  ConstTensorView dy;
  TensorView dw;
  TensorView db;  // or absent
};
void add_weight_gradients(const Context& context, std::span<const WeightGradient> gradients);

}  // namespace ladon
