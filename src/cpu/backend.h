// The CPU backend: drivers plan the work, hand out tasks and own scratch memory; the kernels of one
// instruction set do the arithmetic. Operations without a kernel run as in the reference.
#pragma once

#include "cpu/kernel_table.h"
#include "reference/backend.h"

namespace ladon::cpu {

class CpuBackend final : public reference::ReferenceBackend {
 public:
  /// `isa` must be able to run here, and is not Isa::kReference.
  CpuBackend(Host& host, Isa isa, bool chunk_invariant = false);

  Isa isa() const noexcept override { return isa_; }

  void attend(const AttentionParams& params) override;
  void attend_backward(const AttentionParams& params) override;

  void project(const ProjectionParams& params) override;
  void project_input_gradient(const ProjectionParams& params) override;
  void project_weight_gradient(const ProjectionParams& params) override;

  void rms_norm(const NormParams& params) override;
  void rms_norm_backward(const NormParams& params) override;
  void rotate(const RopeParams& params) override;
  void sum_heads(const HeadSumParams& params) override;

  void write_kv(const KvRowsParams& params) override;
  void gather_kv(const KvRowsParams& params) override;

  void sgd_step(const SgdParams& params) override;
  void adamw_step(const AdamWParams& params) override;
  void accumulate(const AccumulateParams& params) noexcept override;

 private:
  /// The kernels for operands of this dtype.
  const KernelSet& kernels_for(DType dtype) const noexcept;

  const Isa isa_;
  const KernelTable& kernels_;
  const bool chunk_invariant_;  // ContextOptions::chunk_invariant
};

}  // namespace ladon::cpu
