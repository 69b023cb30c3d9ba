#include "cpu/simd/vec_avx2.h"

// The kernels need the vectors above.
#include "cpu/kernels/table.inl"

namespace ladon::cpu::kernels {

extern const KernelTable kAvx2;
constexpr KernelTable kAvx2 = make_kernel_table<F32, F64>();

}  // namespace ladon::cpu::kernels
