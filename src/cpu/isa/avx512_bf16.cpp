#include "cpu/simd/vec_avx512_bf16.h"

// The kernels need the vectors above.
#include "cpu/kernels/pair_decode.inl"
#include "cpu/kernels/pair_projection.inl"
#include "cpu/kernels/pair_table.inl"

namespace ladon::cpu {
namespace {

constexpr KernelTable make_table() {
  KernelTable table = make_kernel_table_of_pairs<F32, F64, VectorEngine<F32OfPairs>>();
  table.bf16.forward_decode = forward_decode_of_pairs<F32, F32OfPairs>;
  table.bf16.project = project_of_pairs<F32, F32OfPairs>;
  table.bf16.project_scratch = project_of_pairs_scratch<F32, F32OfPairs>;
  return table;
}

}  // namespace

namespace kernels {

extern const KernelTable kAvx512Bf16;
constexpr KernelTable kAvx512Bf16 = make_table();

}  // namespace kernels
}  // namespace ladon::cpu
