// Projections in plain double loops.
#pragma once

#include "core/projection_params.h"

namespace ladon::reference {

void project(const ProjectionParams& params);
/// dx += dy W.
void project_input_gradient(const ProjectionParams& params);
/// dw += dy^T x, and db += sum of dy where it is wanted.
void project_weight_gradient(const ProjectionParams& params);

}  // namespace ladon::reference
