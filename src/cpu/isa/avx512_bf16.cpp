#include "cpu/simd/vec_avx512_bf16.h"

// The kernels need the vectors above.
#include "cpu/kernels/pair_products.inl"
#include "cpu/kernels/table.inl"

namespace ladon::cpu {
namespace {

constexpr KernelTable make_table() {
  KernelTable table = make_kernel_table<F32, F64>();
  table.bf16.forward_tile = forward_tile_of_pairs<F32, F32OfPairs>;
  table.bf16.forward_tile_scratch = forward_tile_of_pairs_scratch<F32, F32OfPairs>;
  table.has_bf16 = true;
  return table;
}

}  // namespace

extern const KernelTable kAvx512Bf16Kernels;
constexpr KernelTable kAvx512Bf16Kernels = make_table();

}  // namespace ladon::cpu
