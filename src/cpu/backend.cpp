#include "cpu/backend.h"

#include "cpu/dispatch.h"

namespace ladon::cpu {

CpuBackend::CpuBackend(Host& host, Isa isa, bool chunk_invariant)
    : ReferenceBackend(host),
      isa_(isa),
      kernels_(*cpu::kernels_for(isa)),
      chunk_invariant_(chunk_invariant) {}

const KernelSet& CpuBackend::kernels_for(DType dtype) const noexcept {
  if (dtype == DType::kF64) return kernels_.f64;
  return dtype == DType::kBF16 ? kernels_.bf16 : kernels_.f32;
}

}  // namespace ladon::cpu
