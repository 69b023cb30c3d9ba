#include "cpu/simd/vec_avx512_bf16.h"

// The kernels need the vectors above.
#include "cpu/kernels/pair_table.inl"

namespace ladon::cpu {

extern const KernelTable kAvx512Bf16Kernels;
constexpr KernelTable kAvx512Bf16Kernels =
    make_kernel_table_of_pairs<F32, F64, VectorEngine<F32OfPairs>>();

}  // namespace ladon::cpu
