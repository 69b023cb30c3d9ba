// Projections in plain double loops.
#pragma once

#include <cstdint>

#include "core/projection_params.h"

namespace ladon::reference {

/// One row of y.
void project_row(const ProjectionParams& params, std::int64_t row);
/// dx += dy W, one row of dx.
void project_input_gradient_row(const ProjectionParams& params, std::int64_t row);
/// dw += dy^T x, and db += sum of dy where it is wanted: one row of dw, one element of db.
void project_weight_gradient_row(const ProjectionParams& params, std::int64_t out);

}  // namespace ladon::reference
