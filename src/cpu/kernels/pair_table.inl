// The kernel table of an instruction set that multiplies bf16 pairs.
#pragma once

#include "cpu/kernels/pair_backward.inl"
#include "cpu/kernels/pair_products.inl"
#include "cpu/kernels/table.inl"

namespace ladon::cpu {
namespace {

/// The kernels of Float and Double, and those of an Engine for bf16.
template <class Float, class Double, class Engine>
constexpr KernelTable make_kernel_table_of_pairs() {
  KernelTable table = make_kernel_table<Float, Double>();
  table.bf16.forward_tile = forward_tile_of_pairs<Float, Engine>;
  table.bf16.forward_tile_scratch = forward_tile_of_pairs_scratch<Float, Engine>;
  table.bf16.row_scales = row_scales_of_pairs<Float, Engine>;
  table.bf16.row_scales_scratch = row_scales_of_pairs_scratch<Float, Engine>;
  table.bf16.backward = backward_of_pairs<Float, Engine>;
  table.bf16.backward_scratch = backward_of_pairs_scratch<Float, Engine>;
  return table;
}

}  // namespace
}  // namespace ladon::cpu
