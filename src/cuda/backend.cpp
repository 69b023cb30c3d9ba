#include "cuda/backend.h"

#include "ladon/error.h"

#include "cuda/error.h"
#include "cuda/operations.h"
#include "cuda/step_recorder.h"

namespace ladon::cuda {
namespace {

std::optional<cudaStream_t> stream_of(const ContextOptions& options) {
  if (!options.stream) return std::nullopt;
  return static_cast<cudaStream_t>(*options.stream);
}

}  // namespace

CudaBackend::CudaBackend(const ContextOptions& options, Isa isa)
    : isa_(isa),
      cuda_memory_(std::make_shared<CudaMemory>(options.device_index, stream_of(options))),
      memory_(cuda_memory_),
      closing_{*cuda_memory_},
      scratch_(memory_),
      resources_(cuda_memory_, scratch_),
      queue_(resources_) {}

CudaBackend::~CudaBackend() = default;

void CudaBackend::synchronize() { queue_.synchronize(); }

std::unique_ptr<StepRecorder> CudaBackend::make_recorder() {
  return std::make_unique<CudaStepRecorder>(cuda_memory_);
}

template <class Work>
auto CudaBackend::enqueue(const Work& work) {
  const DeviceScope scope(queue_.device_index());
  check(scope.status(), "Context");
  queue_.refuse_capture();
  return work();
}

void CudaBackend::copy(const ConstTensorView& from, const TensorView& to) {
  enqueue([&] { cuda::copy(queue_, from, to); });
}
void CudaBackend::zero(const TensorView& view) {
  enqueue([&] { cuda::zero(queue_, view); });
}
void CudaBackend::fill_random(const RandomFillParams& params) {
  enqueue([&] { cuda::fill_random(queue_, params); });
}

void CudaBackend::attend(const AttentionParams& params) {
  enqueue([&] { cuda::attend(queue_, params); });
}
void CudaBackend::attend_backward(const AttentionParams& params) {
  enqueue([&] { cuda::attend_backward(queue_, params); });
}
void CudaBackend::attention_weights(const AttentionParams& params, ScoreStage stage,
                                    const WeightsOperand& weights) {
  enqueue([&] { cuda::attention_weights(queue_, params, stage, weights); });
}
void CudaBackend::merge(const MergeParams& params) {
  enqueue([&] { cuda::merge(queue_, params); });
}

void CudaBackend::project(const ProjectionParams& params) {
  enqueue([&] { cuda::project(queue_, {&params, 1}); });
}
void CudaBackend::project_all(std::span<const ProjectionParams> params) {
  enqueue([&] { cuda::project(queue_, params); });
}
void CudaBackend::project_input_gradient(const ProjectionParams& params) {
  enqueue([&] { cuda::project_input_gradient(queue_, params); });
}
void CudaBackend::project_input_gradients(std::span<const ProjectionParams> params) {
  enqueue([&] { cuda::project_input_gradients(queue_, params); });
}
void CudaBackend::project_weight_gradient(const ProjectionParams& params) {
  project_weight_gradients({&params, 1});
}
void CudaBackend::project_weight_gradients(std::span<const ProjectionParams> params) {
  enqueue([&] { cuda::project_weight_gradients(queue_, params); });
}

void CudaBackend::rms_norm(const NormParams& params) {
  enqueue([&] { cuda::rms_norm(queue_, params); });
}
void CudaBackend::rms_norm_backward(const NormParams& params) {
  enqueue([&] { cuda::rms_norm_backward(queue_, params); });
}
void CudaBackend::rotate(const RopeParams& params) {
  enqueue([&] { cuda::rotate(queue_, {&params, 1}); });
}
void CudaBackend::rotate_all(std::span<const RopeParams> params) {
  enqueue([&] { cuda::rotate(queue_, params); });
}
void CudaBackend::fill_rope_table(std::span<const double> frequencies, double magnitude,
                                  const TensorView& cos, const TensorView& sin) {
  enqueue([&] { cuda::fill_rope_table(queue_, frequencies, magnitude, cos, sin); });
}
void CudaBackend::sum_heads(const HeadSumParams& params) {
  enqueue([&] { cuda::sum_heads(queue_, params); });
}

void CudaBackend::write_kv(const KvRowsParams& params) {
  enqueue([&] { cuda::write_kv(queue_, params); });
}
void CudaBackend::append_kv(const AppendSteps& steps, const KvRowsParams& rows) {
  enqueue([&] { cuda::append_kv(queue_, steps, rows); });
}
void CudaBackend::gather_kv(const KvRowsParams& params) {
  enqueue([&] { cuda::gather_kv(queue_, params); });
}

void CudaBackend::sgd_step(const SgdParams& params) {
  enqueue([&] { cuda::sgd_step(queue_, params); });
}
void CudaBackend::adamw_step(const AdamWParams& params) {
  enqueue([&] { cuda::adamw_step(queue_, params); });
}
void CudaBackend::accumulate(const AccumulateParams& params) noexcept {
  // A launch fails only where the device has failed, and then the next call says so.
  try {
    enqueue([&] { cuda::accumulate(queue_, params); });
  } catch (...) {
    if (Recording* const recording = cuda_memory_->recording()) recording->mark_incomplete();
  }
}
void CudaBackend::scale(const FloatArray& array, double factor) {
  enqueue([&] { cuda::scale(queue_, array, factor); });
}
Magnitude CudaBackend::magnitude(std::span<const FloatArray> arrays, int exponent) {
  return enqueue([&] { return cuda::magnitude(queue_, arrays, exponent); });
}

}  // namespace ladon::cuda
