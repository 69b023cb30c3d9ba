// rope() and its backward as plain double loops: the truth that the fast version is tested against,
// and what runs under Isa::kReference. Arguments are taken to be valid; layers/rope.cpp checks
// them.
#pragma once

#include "ladon/rope.h"

namespace ladon {

/// Angles from the options. `out` may be `x` itself.
void rope_reference(const ConstTensorView& x, const RopeOptions& options,
                    const RopePositions& positions, const TensorView& out);
void rope_backward_reference(const ConstTensorView& dout, const RopeOptions& options,
                             const RopePositions& positions, const TensorView& dx);

/// Cosines and sines from tables.
void rope_reference(const ConstTensorView& x, const RopeOptions& options, const RopeTable& table,
                    const RopePositions& positions, const TensorView& out);
void rope_backward_reference(const ConstTensorView& dout, const RopeOptions& options,
                             const RopeTable& table, const RopePositions& positions,
                             const TensorView& dx);

}  // namespace ladon
