#include "cpu/simd/vec_baseline.h"

// The kernels need the vectors above.
#include "cpu/kernels/table.inl"

namespace ladon::cpu::kernels {

extern const KernelTable kBaseline;
constexpr KernelTable kBaseline = make_kernel_table<F32, F64>();

}  // namespace ladon::cpu::kernels
