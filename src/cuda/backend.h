// The CUDA backend: one stream of one GPU. Operations are enqueued and return.
#pragma once

#include <memory>

#include "core/backend.h"
#include "cuda/memory.h"
#include "cuda/queue.h"
#include "cuda/queue_resources.h"

namespace ladon::cuda {

class CudaBackend final : public Backend {
 public:
  CudaBackend(const ContextOptions& options, Isa isa);
  ~CudaBackend() override;

  const std::shared_ptr<DeviceMemory>& memory() const noexcept override { return memory_; }
  WorkspacePool& scratch() noexcept override { return scratch_; }
  Isa isa() const noexcept override { return isa_; }
  void synchronize() override;
  std::unique_ptr<StepRecorder> make_recorder() override;

  void copy(const ConstTensorView& from, const TensorView& to) override;
  void zero(const TensorView& view) override;
  void fill_random(const RandomFillParams& params) override;

  void attend(const AttentionParams& params) override;
  void attend_backward(const AttentionParams& params) override;
  void attention_weights(const AttentionParams& params, ScoreStage stage,
                         const WeightsOperand& weights) override;
  void merge(const MergeParams& params) override;

  void project(const ProjectionParams& params) override;
  void project_all(std::span<const ProjectionParams> params) override;
  void project_input_gradient(const ProjectionParams& params) override;
  void project_input_gradients(std::span<const ProjectionParams> params) override;
  void project_weight_gradient(const ProjectionParams& params) override;
  void project_weight_gradients(std::span<const ProjectionParams> params) override;

  void rms_norm(const NormParams& params) override;
  void rms_norm_backward(const NormParams& params) override;
  void rotate(const RopeParams& params) override;
  void rotate_all(std::span<const RopeParams> params) override;
  void fill_rope_table(std::span<const double> frequencies, double magnitude, const TensorView& cos,
                       const TensorView& sin) override;
  void sum_heads(const HeadSumParams& params) override;

  void write_kv(const KvRowsParams& params) override;
  void append_kv(const AppendSteps& steps, const KvRowsParams& rows) override;
  void gather_kv(const KvRowsParams& params) override;

  void sgd_step(const SgdParams& params) override;
  void adamw_step(const AdamWParams& params) override;
  void accumulate(const AccumulateParams& params) noexcept override;
  void scale(const FloatArray& array, double factor) override;
  Magnitude magnitude(std::span<const FloatArray> arrays, int exponent) override;

 private:
  /// Tells the memory that the Context goes, after scratch memory has gone back.
  struct Closing {
    CudaMemory& memory;
    ~Closing() { memory.close(); }
  };

  /// Calls work() with this GPU as the thread's current one.
  template <class Work>
  auto enqueue(const Work& work);

  const Isa isa_;
  const std::shared_ptr<CudaMemory> cuda_memory_;
  const std::shared_ptr<DeviceMemory> memory_;  // the same
  const Closing closing_;
  WorkspacePool scratch_;
  QueueResources resources_;
  Queue queue_;
};

}  // namespace ladon::cuda
