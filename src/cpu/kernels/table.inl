// The kernel table of one instruction set. An isa/<name>.cpp includes its vectors and then this.
#pragma once

#include "cpu/kernel_table.h"
#include "cpu/kernels/backward.inl"
#include "cpu/kernels/forward_tile.inl"
#include "cpu/kernels/integer_decode.inl"
#include "cpu/kernels/kv_rows.inl"
#include "cpu/kernels/norm.inl"
#include "cpu/kernels/optimiser.inl"
#include "cpu/kernels/projection.inl"
#include "cpu/kernels/projection_gradient.inl"
#include "cpu/kernels/row_scales.inl"
#include "cpu/kernels/side_gradients.inl"
#include "cpu/kernels/sums.inl"

namespace ladon::cpu {
namespace {

template <class V>
constexpr KernelSet make_kernel_set() {
  static_assert(kTileRows<V> <= kMaxRows && kDecodeRows <= kMaxRows);
  static_assert(kKeyBlock % V::kLanes == 0 && kBackwardKeys % kKeyBlock == 0);
  KernelSet set;
  set.compute_bytes = sizeof(typename V::Scalar);
  set.tile_rows = kTileRows<V>;
  set.decode_rows = kDecodeRows;
  set.decode_states = kDecodeStates;
#define LADON_KERNEL(name, Params, Task) \
  set.name = name<V>;                    \
  set.name##_scratch = name##_scratch<V>;
#include "cpu/kernels.def"
#undef LADON_KERNEL
  return set;
}

/// For an instruction set without bf16 arithmetic.
template <class Float, class Double>
constexpr KernelTable make_kernel_table() {
  const KernelSet floats = make_kernel_set<Float>();
  return {floats, make_kernel_set<Double>(), floats};
}

}  // namespace
}  // namespace ladon::cpu
