// The CPU and the GPU with the same weights: the same results, gradients and loss curves, within
// what their roundings may differ by.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "cuda/cuda_test.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr DType kFloats[] = {DType::kF64, DType::kF32, DType::kF16, DType::kBF16};
constexpr std::int64_t kEmbed = 48;

MultiHeadAttention multi_head(DType dtype) {
  return MultiHeadAttention({.embed_dim = kEmbed,
                             .num_heads = 6,
                             .num_kv_heads = 2,
                             .head_dim = 20,
                             .query_bias = true,
                             .key_bias = true,
                             .value_bias = true,
                             .out_bias = true,
                             .causal = true,
                             .rope = RopeOptions{},
                             .qk_norm = true,
                             .softcap = 15,
                             .sinks = true,
                             .dtype = dtype},
                            11);
}

LatentAttention latent(DType dtype, LatentForm form) {
  return LatentAttention({.embed_dim = kEmbed,
                          .num_heads = 4,
                          .query_rank = 24,
                          .kv_rank = 32,
                          .nope_dim = 16,
                          .rope_dim = 8,
                          .value_dim = 24,
                          .causal = true,
                          .form = form,
                          .dtype = dtype},
                         12);
}

class CudaAgreement : public CudaTest {
 protected:
  /// Forward and all gradients; differences as shares of the largest number of each tensor.
  template <class Layer>
  void expect_agreement(Layer on_cpu, const std::string& what) {
    const DType dtype = on_cpu.dtype();
    Layer on_gpu = on_cpu;
    on_gpu.to(context());
    const Tensor x = random_tensor(dtype, {2, 90, kEmbed}, 1);
    const Tensor grad = random_tensor(dtype, {2, 90, kEmbed}, 2);
    const Context& cpu = host_context();
    const auto compare = [&](const Tensor& got, const Tensor& expected, const std::string& name) {
      // 16-bit results pass through several roundings: projections, attention, projection.
      const double bound = (dtype == DType::kF64  ? 1e4
                            : size_of(dtype) == 2 ? 8
                                                  : 200) *
                           epsilon_of(dtype);
      EXPECT_LE(relative_difference(got, expected), bound)
          << what << " " << name_of(dtype) << " " << name;
    };
    compare(on_gpu.forward(context(), x.to(context())), on_cpu.forward(cpu, x), "forward");
    const TrainingForward there = on_gpu.forward_training(context(), {.query = x.to(context())});
    const TrainingForward here = on_cpu.forward_training(cpu, {.query = x});
    compare(there.out, here.out, "forward_training");
    const Tensor got = on_gpu.backward(context(), grad.to(context()), there.saved).query;
    compare(got, on_cpu.backward(cpu, grad, here.saved).query, "dx");
    for (const Parameter& parameter : on_cpu.named_parameters()) {
      compare(on_gpu.parameter(parameter.name).gradient, parameter.gradient, parameter.name);
    }
  }
};

TEST_F(CudaAgreement, LayersAndTheirGradients) {
  for (const DType dtype : kFloats) {
    expect_agreement(multi_head(dtype), "multi-head");
    expect_agreement(latent(dtype, LatentForm::kExpanded), "expanded");
    expect_agreement(latent(dtype, LatentForm::kAbsorbed), "absorbed");
  }
}

/// The loss at each step of learning to give a fixed target.
std::vector<double> loss_curve(const Context& context, DType dtype, int steps) {
  MultiHeadAttention layer = multi_head(dtype);
  layer.to(context);
  AdamW optimiser(context, layer.parameters(), {.learning_rate = 3e-3});
  const Tensor x = random_tensor(dtype, {4, 30, kEmbed}, 3);
  const std::vector<double> target = elements_of(random_tensor(dtype, {4, 30, kEmbed}, 4, 0.5));
  const Tensor there = x.to(context);
  std::vector<double> losses;
  for (int step = 0; step < steps; ++step) {
    layer.zero_grad(context);
    const TrainingForward forward = layer.forward_training(context, {.query = there});
    const std::vector<double> out = elements_of(forward.out);
    double loss = 0;
    std::vector<double> gradient;
    for (std::size_t i = 0; i < out.size(); ++i) {
      const double off = out[i] - target[i];
      loss += off * off / static_cast<double>(out.size());
      gradient.push_back(off / 100);
    }
    losses.push_back(loss);
    layer.backward(context, Tensor::from_values(dtype, x.shape(), gradient).to(context),
                   forward.saved);
    optimiser.step(context);
  }
  return losses;
}

TEST_F(CudaAgreement, TwoHundredStepsOfTrainingHaveTheSameLosses) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::vector<double> here = loss_curve(host_context(), dtype, 200);
    const std::vector<double> there = loss_curve(context(), dtype, 200);
    double worst = 0;
    for (std::size_t i = 0; i < here.size(); ++i) {
      worst = std::max(worst, std::abs(here[i] - there[i]) / here[i]);
    }
    std::printf("%s: the loss goes from %.4f to %.4f; curves differ by %.1e at most\n",
                name_of(dtype), here.front(), here.back(), worst);
    EXPECT_LT(here.back(), 0.7 * here.front());  // something is learnt
    EXPECT_LE(worst, dtype == DType::kF32 ? 1e-3 : 2e-2) << name_of(dtype);
  }
}

}  // namespace
}  // namespace ladon::test
