#include "cpu/simd/vec_avx2.h"

// The kernels need the vectors above.
#include "cpu/kernels/table.inl"

namespace ladon::cpu {

extern const KernelTable kAvx2Kernels;
constexpr KernelTable kAvx2Kernels = make_kernel_table<F32, F64>();

}  // namespace ladon::cpu
