// Backend: the seam between the layers and a machine. One method per operation; params are checked
// and plain.
//
// Tensors in the params are memory of this backend's device; lists that describe them (sequences,
// runs, positions) are host memory, which a backend has read by the time a method returns. A method
// returns when its work is done or enqueued; what is enqueued runs in order. Everything that can
// fail is checked, and all memory taken, before the first element is written.
//
// A new device is a new folder with a Backend, and a line in backends.cpp.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "core/attention_params.h"
#include "core/device_memory.h"
#include "core/element_params.h"
#include "core/kv_params.h"
#include "core/norm_params.h"
#include "core/optimiser_params.h"
#include "core/projection_params.h"
#include "core/random_params.h"
#include "core/rope_params.h"
#include "core/step_recorder.h"
#include "core/workers.h"
#include "core/workspace_pool.h"
#include "ladon/attention.h"
#include "ladon/context.h"
#include "ladon/tensor_view.h"

namespace ladon {

/// What every Context has on the host: threads, and scratch memory for lists.
struct Host {
  explicit Host(const ContextOptions& options) : workers(options), scratch(host_memory()) {}

  Workers workers;
  WorkspacePool scratch;
};

class Backend {
 public:
  virtual ~Backend() = default;
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  // Where tensors of its Contexts live, and temporaries of one call.
  virtual const std::shared_ptr<DeviceMemory>& memory() const noexcept = 0;
  virtual WorkspacePool& scratch() noexcept = 0;
  DeviceId device() const noexcept { return memory()->device(); }
  /// The kernels that run on the host's side.
  virtual Isa isa() const noexcept = 0;
  /// Waits for all that was enqueued.
  virtual void synchronize() = 0;
  /// For a Graph. Null where operations run at once, and there is nothing to gather.
  virtual std::unique_ptr<StepRecorder> make_recorder() { return nullptr; }

  // Elements, of any dtype and strides.
  virtual void copy(const ConstTensorView& from, const TensorView& to) = 0;
  virtual void zero(const TensorView& view) = 0;
  virtual void fill_random(const RandomFillParams& params) = 0;

  virtual void attend(const AttentionParams& params) = 0;
  /// Writes those of dq, dk, dv, dbias and dsinks that are present.
  virtual void attend_backward(const AttentionParams& params) = 0;
  virtual void attention_weights(const AttentionParams& params, ScoreStage stage,
                                 const WeightsOperand& weights) = 0;
  virtual void merge(const MergeParams& params) = 0;

  virtual void project(const ProjectionParams& params) = 0;
  /// dx += dy W.
  virtual void project_input_gradient(const ProjectionParams& params) = 0;
  /// dx = the sum of dy W over all of them, at least one. They have one dx, of any float dtype,
  /// which is rounded once.
  virtual void project_input_gradients(std::span<const ProjectionParams> params) = 0;
  /// dw += dy^T x and, where it is present, db += sum of dy's rows. One head.
  virtual void project_weight_gradient(const ProjectionParams& params) = 0;

  virtual void rms_norm(const NormParams& params) = 0;
  virtual void rms_norm_backward(const NormParams& params) = 0;
  virtual void rotate(const RopeParams& params) = 0;
  /// cos and sin [position, pair] of positions 0, 1, ...; frequencies are host memory.
  virtual void fill_rope_table(std::span<const double> frequencies, double magnitude,
                               const TensorView& cos, const TensorView& sin) = 0;
  virtual void sum_heads(const HeadSumParams& params) = 0;

  virtual void write_kv(const KvRowsParams& params) = 0;
  virtual void gather_kv(const KvRowsParams& params) = 0;

  virtual void sgd_step(const SgdParams& params) = 0;
  virtual void adamw_step(const AdamWParams& params) = 0;
  /// Cannot fail: it ends a backward pass.
  virtual void accumulate(const AccumulateParams& params) noexcept = 0;
  /// Elements times a factor, multiplied in double.
  virtual void scale(const FloatArray& array, double factor) = 0;
  /// Of all arrays together, in a fixed order. Waits.
  virtual Magnitude magnitude(std::span<const FloatArray> arrays, int exponent) = 0;

  // Several operations of which none reads what another one writes: one launch on a device that
  // gains by it.
  /// Such as q, k and v of the same rows.
  virtual void project_all(std::span<const ProjectionParams> params) {
    for (const ProjectionParams& one : params) project(one);
  }
  /// The gradients of such weights.
  virtual void project_weight_gradients(std::span<const ProjectionParams> params) {
    for (const ProjectionParams& one : params) project_weight_gradient(one);
  }
  /// Such as the queries and keys of the same tokens.
  virtual void rotate_all(std::span<const RopeParams> params) {
    for (const RopeParams& one : params) rotate(one);
  }
  /// rotate_all(), then write_kv(): the keys of new tokens, rotated on their way into a cache.
  virtual void append_kv(const AppendSteps& steps, const KvRowsParams& rows) {
    rotate_all(steps.rotations);
    write_kv(rows);
  }

 protected:
  Backend() = default;
};

/// The backend that the options name. `host` outlives it. Throws Error where this build or this
/// machine has none. Defined in backends.cpp, the one file that knows them all.
std::unique_ptr<Backend> make_backend(const ContextOptions& options, Host& host);

}  // namespace ladon
