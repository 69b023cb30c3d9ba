#include "cpu/simd/vec_avx512.h"

// The kernels need the vectors above.
#include "cpu/kernels/table.inl"

namespace ladon::cpu::kernels {

extern const KernelTable kAvx512;
constexpr KernelTable kAvx512 = make_kernel_table<F32, F64>();

}  // namespace ladon::cpu::kernels
