#include "cpu/simd/vec_avx512.h"

// The kernels need the vectors above.
#include "cpu/kernels/table.inl"

namespace ladon::cpu {

extern const KernelTable kAvx512Kernels;
constexpr KernelTable kAvx512Kernels = make_kernel_table<F32, F64>();

}  // namespace ladon::cpu
