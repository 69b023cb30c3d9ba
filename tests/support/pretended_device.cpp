#include "support/pretended_device.h"

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "core/context_impl.h"
#include "cpu/backend.h"
#include "cpu/dispatch.h"
#include "support/protected_memory.h"

namespace ladon::test {
namespace {

/// Every operation with the memory open, on the CPU's backend.
class PretendedBackend final : public Backend {
 public:
  PretendedBackend(Host& host, const ContextOptions& options)
      : cpu_(std::make_unique<cpu::CpuBackend>(host, cpu::choose_isa(options.isa))),
        memory_(protected_memory()),
        scratch_(memory_) {}

  const std::shared_ptr<DeviceMemory>& memory() const noexcept override { return memory_; }
  WorkspacePool& scratch() noexcept override { return scratch_; }
  Isa isa() const noexcept override { return cpu_->isa(); }
  void synchronize() override {}

  void copy(const ConstTensorView& from, const TensorView& to) override {
    expect_here("copy", {from.data(), to.data()});
    run([&] { cpu_->copy(from, to); });
  }
  void zero(const TensorView& view) override {
    expect_here("zero", {view.data()});
    run([&] { cpu_->zero(view); });
  }
  void fill_random(const RandomFillParams& params) override {
    expect_here("fill_random", {params.view.data()});
    run([&] { cpu_->fill_random(params); });
  }
  void attend(const AttentionParams& params) override {
    expect_operands("attend", params);
    run([&] { cpu_->attend(params); });
  }
  void attend_backward(const AttentionParams& params) override {
    expect_operands("attend_backward", params);
    expect_here("attend_backward",
                {params.dout.data, params.dlse.data, params.dq.data, params.dk.data, params.dv.data,
                 params.dbias.data, params.dsinks.data});
    run([&] { cpu_->attend_backward(params); });
  }
  void attention_weights(const AttentionParams& params, ScoreStage stage,
                         const WeightsOperand& weights) override {
    expect_operands("attention_weights", params);
    expect_here("attention_weights", {weights.data});
    run([&] { cpu_->attention_weights(params, stage, weights); });
  }
  void merge(const MergeParams& params) override {
    for (const MergePart& part : params.parts) expect_here("merge", {part.out, part.lse});
    expect_here("merge", {params.result.out, params.result.lse, params.sinks.data});
    run([&] { cpu_->merge(params); });
  }
  void project(const ProjectionParams& params) override {
    expect_operands("project", params);
    run([&] { cpu_->project(params); });
  }
  void project_input_gradient(const ProjectionParams& params) override {
    expect_operands("project_input_gradient", params);
    run([&] { cpu_->project_input_gradient(params); });
  }
  void project_input_gradients(std::span<const ProjectionParams> params) override {
    for (const ProjectionParams& one : params) expect_operands("project_input_gradients", one);
    run([&] { cpu_->project_input_gradients(params); });
  }
  void project_weight_gradient(const ProjectionParams& params) override {
    expect_operands("project_weight_gradient", params);
    run([&] { cpu_->project_weight_gradient(params); });
  }
  void rms_norm(const NormParams& params) override {
    expect_here("rms_norm", {params.x.data, params.weight.data, params.y.data});
    run([&] { cpu_->rms_norm(params); });
  }
  void rms_norm_backward(const NormParams& params) override {
    expect_here("rms_norm_backward", {params.x.data, params.weight.data, params.dy.data,
                                      params.dx.data, params.dweight.data});
    run([&] { cpu_->rms_norm_backward(params); });
  }
  void rotate(const RopeParams& params) override {
    expect_here("rotate", {params.x.data, params.out.data, params.cos.data, params.sin.data});
    run([&] { cpu_->rotate(params); });
  }
  void fill_rope_table(std::span<const double> frequencies, double magnitude, const TensorView& cos,
                       const TensorView& sin) override {
    expect_here("fill_rope_table", {cos.data(), sin.data()});
    run([&] { cpu_->fill_rope_table(frequencies, magnitude, cos, sin); });
  }
  void sum_heads(const HeadSumParams& params) override {
    expect_here("sum_heads", {params.x.data, params.y.data});
    run([&] { cpu_->sum_heads(params); });
  }
  void write_kv(const KvRowsParams& params) override {
    expect_operands("write_kv", params);
    run([&] { cpu_->write_kv(params); });
  }
  void gather_kv(const KvRowsParams& params) override {
    expect_operands("gather_kv", params);
    run([&] { cpu_->gather_kv(params); });
  }
  void sgd_step(const SgdParams& params) override {
    expect_operands("sgd_step", params.operands);
    expect_here("sgd_step", {params.velocity});
    run([&] { cpu_->sgd_step(params); });
  }
  void adamw_step(const AdamWParams& params) override {
    expect_operands("adamw_step", params.operands);
    expect_here("adamw_step", {params.first, params.second});
    run([&] { cpu_->adamw_step(params); });
  }
  void accumulate(const AccumulateParams& params) noexcept override {
    expect_here("accumulate", {params.from.data, params.to.data});
    run([&] { cpu_->accumulate(params); });
  }
  void scale(const FloatArray& array, double factor) override {
    expect_here("scale", {array.data});
    run([&] { cpu_->scale(array, factor); });
  }
  Magnitude magnitude(std::span<const FloatArray> arrays, int exponent) override {
    for (const FloatArray& array : arrays) expect_here("magnitude", {array.data});
    const ProtectedMemory::Access access(*protected_memory());
    return cpu_->magnitude(arrays, exponent);
  }

 private:
  template <class Work>
  void run(const Work& work) {
    const ProtectedMemory::Access access(*protected_memory());
    work();
  }

  /// Pointers that are not null must be the device's.
  static void expect_here(const char* operation, std::initializer_list<const void*> operands) {
    for (const void* operand : operands) {
      if (operand == nullptr || protected_memory()->owns(operand)) continue;
      std::fprintf(stderr, "pretended device: %s: got memory of the host\n", operation);
      std::abort();
    }
  }
  static void expect_operands(const char* operation, const AttentionParams& params) {
    expect_here(operation, {params.q.data, params.k.data, params.v.data, params.out.data,
                            params.lse.data, params.rules.bias.data, params.rules.mask.data,
                            params.rules.sinks.data, params.rules.alibi_slopes.data,
                            params.kv_layout.k_scales, params.kv_layout.v_scales});
  }
  static void expect_operands(const char* operation, const ProjectionParams& params) {
    expect_here(operation, {params.x.data, params.w.data, params.b.data, params.y.data,
                            params.dx.data, params.dw.data, params.db.data});
  }
  static void expect_operands(const char* operation, const KvRowsParams& params) {
    expect_here(operation, {params.k.data, params.v.data, params.k_slots.data, params.v_slots.data,
                            params.k_slots.scales, params.v_slots.scales});
  }
  static void expect_operands(const char* operation, const OptimiserOperands& operands) {
    expect_here(operation, {operands.value, operands.gradient, operands.master});
  }

  std::unique_ptr<Backend> cpu_;
  std::shared_ptr<DeviceMemory> memory_;
  WorkspacePool scratch_;
};

}  // namespace

Context pretended_context(const ContextOptions& options) {
  return Context(std::make_unique<Context::Impl>(
      options, [&](Host& host) { return std::make_unique<PretendedBackend>(host, options); }));
}

std::size_t pretended_bytes_in_use() { return protected_memory()->bytes_in_use(); }

}  // namespace ladon::test
