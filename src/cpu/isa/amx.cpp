#include "cpu/simd/vec_avx512_bf16.h"

// The kernels need the vectors above.
#include "cpu/kernels/tile_engine.inl"

namespace ladon::cpu {

extern const KernelTable kAmxKernels;
constexpr KernelTable kAmxKernels = make_kernel_table_of_pairs<F32, F64, TileEngine>();

}  // namespace ladon::cpu
