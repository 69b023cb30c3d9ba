// How right gradients in bf16 are: Ladon's and PyTorch's, of the same inputs.
#pragma once

#include <string>
#include <vector>

#include "session.h"
#include "shape.h"

namespace ladon::bench {

/// What is looked at; small, because the truth is plain loops in f64.
std::vector<Shape> gradient_shapes();

/// "gradients bf16 backward B1 H8 S512 D128 full".
std::string gradient_name(const Shape& shape);

/// Against PyTorch, where it runs: else nothing is done.
void compare_gradients(Session& session, Isa isa, const Shape& shape);

}  // namespace ladon::bench
