// The reference backend: every operation in plain loops, in double where rounding matters. The
// truth that kernels are tested against, and what LADON_ISA=reference runs. The CPU backend derives
// from it and overrides what it has kernels for.
#pragma once

#include <memory>
#include <span>

#include "core/backend.h"

namespace ladon::reference {

class ReferenceBackend : public Backend {
 public:
  explicit ReferenceBackend(Host& host) : host_(host) {}

  const std::shared_ptr<DeviceMemory>& memory() const noexcept override { return host_memory(); }
  WorkspacePool& scratch() noexcept override { return host_.scratch; }
  Isa isa() const noexcept override { return Isa::kReference; }
  void synchronize() override {}

  void copy(const ConstTensorView& from, const TensorView& to) override;
  void zero(const TensorView& view) override;
  void fill_random(const RandomFillParams& params) override;

  void attend(const AttentionParams& params) override;
  void attend_backward(const AttentionParams& params) override;
  void attention_weights(const AttentionParams& params, ScoreStage stage,
                         const WeightsOperand& weights) override;
  void merge(const MergeParams& params) override;

  void project(const ProjectionParams& params) override;
  void project_input_gradient(const ProjectionParams& params) override;
  void project_input_gradients(std::span<const ProjectionParams> params) override;
  void project_weight_gradient(const ProjectionParams& params) override;

  void rms_norm(const NormParams& params) override;
  void rms_norm_backward(const NormParams& params) override;
  void rotate(const RopeParams& params) override;
  void fill_rope_table(std::span<const double> frequencies, double magnitude, const TensorView& cos,
                       const TensorView& sin) override;
  void sum_heads(const HeadSumParams& params) override;

  void write_kv(const KvRowsParams& params) override;
  void gather_kv(const KvRowsParams& params) override;

  void sgd_step(const SgdParams& params) override;
  void adamw_step(const AdamWParams& params) override;
  void accumulate(const AccumulateParams& params) noexcept override;
  void scale(const FloatArray& array, double factor) override;
  Magnitude magnitude(std::span<const FloatArray> arrays, int exponent) override;

 protected:
  Host& host() noexcept { return host_; }
  const Workers& workers() const noexcept { return host_.workers; }

 private:
  Host& host_;
};

}  // namespace ladon::reference
