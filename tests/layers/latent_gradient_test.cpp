// Gradients of LatentAttention against finite differences of its forward pass, in f64: the input
// and every parameter.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "ladon/latent_attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/finite_differences.h"

namespace ladon::test {
namespace {

class LatentGradient : public ContextTest {};

struct LatentCase {
  std::string name;
  LatentAttentionOptions options;
  bool masked = false;
  bool batched = true;
};

std::vector<LatentCase> every_case() {
  std::vector<LatentCase> setups;
  const auto add = [&](std::string name, const std::function<void(LatentCase&)>& change) {
    LatentCase setup{.name = std::move(name),
                     .options = {.embed_dim = 6,
                                 .num_heads = 2,
                                 .query_rank = 5,
                                 .kv_rank = 4,
                                 .nope_dim = 3,
                                 .rope_dim = 2,
                                 .value_dim = 4,
                                 .causal = true,
                                 .dtype = DType::kF64}};
    change(setup);
    setups.push_back(setup);
  };
  add("plain", [](LatentCase&) {});
  add("direct queries", [](LatentCase& s) { s.options.query_rank = 0; });
  add("biases",
      [](LatentCase& s) { s.options.query_bias = s.options.kv_bias = s.options.out_bias = true; });
  add("biases, direct", [](LatentCase& s) {
    s.options.query_rank = 0;
    s.options.query_bias = s.options.kv_bias = s.options.out_bias = true;
  });
  add("no norms", [](LatentCase& s) { s.options.query_norm = s.options.kv_norm = false; });
  add("no rope", [](LatentCase& s) { s.options.rope_dim = 0; });
  add("rope alone", [](LatentCase& s) { s.options.nope_dim = 0; });
  add("yarn", [](LatentCase& s) {
    s.options.rope.scaling = {.kind = RopeScaling::kYarn,
                              .factor = 4,
                              .original_context = 4,
                              .mscale = 1,
                              .mscale_all_dim = 0.5};
  });
  add("dropout", [](LatentCase& s) { s.options.dropout = 0.3; });
  add("mask, bias and lengths", [](LatentCase& s) {
    s.masked = true;
    s.options.causal = false;
  });
  add("without a batch", [](LatentCase& s) { s.batched = false; });
  return setups;
}

class Experiment {
 public:
  Experiment(const Context& context, const LatentCase& setup)
      : context_(context),
        layer_(setup.options, 5),
        x_(random_f64(setup.batched ? Dims{2, 5, 6} : Dims{5, 6}, 1)),
        grad_out_(random_f64(x_.shape(), 2)),
        mask_(context, DType::kBool, {1, 2, 5, 5}),
        bias_(random_f64({1, 1, 5, 5}, 3)) {
    layer_.to(context_);
    std::uint64_t stream = 10;
    for (Parameter& parameter : layer_.named_parameters()) {
      if (parameter.value.rank() == 1)
        fill_uniform(context_, parameter.value, 0.3, 1.4, 3, stream++);
    }
    call_.dropout_seed = 77;
    call_.query_positions.first = call_.key_positions.first = 3;
    if (!setup.masked) return;
    std::vector<double> seen;
    for (std::int64_t i = 0; i < mask_.num_elements(); ++i) seen.push_back(i % 4 != 2 ? 1 : 0);
    set_elements(context_, mask_, seen);
    call_.mask = mask_;
    call_.bias = bias_;
    call_.kv_lengths = kLengths;
  }

  /// Every number that can be moved, with the gradient that backward gave for it.
  void check() {
    layer_.zero_grad(context_);
    const TrainingForward forward = layer_.forward_training(context_, {.query = x_}, call_);
    const InputGradients gradients = layer_.backward(context_, grad_out_, forward.saved);
    EXPECT_EQ(gradients.query.shape(), x_.shape());
    compare("x", x_, gradients.query);
    for (Parameter& parameter : layer_.named_parameters()) {
      compare(parameter.name, parameter.value, parameter.gradient);
    }
  }

 private:
  static constexpr std::int64_t kLengths[] = {5, 3};

  Tensor random_f64(const Dims& shape, std::uint64_t stream) const {
    Tensor tensor(context_, DType::kF64, shape);
    fill_normal(context_, tensor, 0, 1, 5, stream);
    return tensor;
  }

  double loss() {
    const TrainingForward forward = layer_.forward_training(context_, {.query = x_}, call_);
    const std::vector<double> out = elements_of(forward.out);
    const std::vector<double> grad = elements_of(grad_out_);
    return std::inner_product(out.begin(), out.end(), grad.begin(), 0.0);
  }

  void compare(const std::string& name, Tensor& value, const Tensor& gradient) {
    const std::vector<double> got = elements_of(gradient);
    const std::vector<double> expected = slopes_of(context_, value, [&] { return loss(); });
    ASSERT_EQ(got.size(), expected.size()) << name;
    double largest = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
      EXPECT_NEAR(got[i], expected[i], 1e-7 * (1 + std::fabs(expected[i])))
          << name << "[" << i << "]";
      largest = std::max(largest, std::fabs(got[i]));
    }
    EXPECT_GT(largest, 1e-3) << name << " moves nothing";
  }

  const Context& context_;
  LatentAttention layer_;
  Tensor x_, grad_out_, mask_, bias_;
  LayerCall call_;
};

TEST_P(LatentGradient, FiniteDifferencesAgree) {
  for (const LatentCase& setup : every_case()) {
    SCOPED_TRACE(setup.name);
    Experiment(context_, setup).check();
  }
}

TEST_P(LatentGradient, SixteenBitLayersTrackF32) {
  LatentAttentionOptions options = every_case().front().options;
  options.dtype = DType::kF32;
  LatentAttention exact = there(LatentAttention(options, 5));
  options.dtype = DType::kBF16;
  LatentAttention rounded = there(LatentAttention(options, 5));
  for (std::size_t i = 0; i < exact.named_parameters().size(); ++i) {
    exact.named_parameters()[i].value =
        Tensor::copy_of(context_, rounded.named_parameters()[i].value, DType::kF32);
  }
  const Tensor x = normal(DType::kBF16, {2, 5, 6}, 5, 1);
  const Tensor wide = Tensor::copy_of(context_, x, DType::kF32);
  const auto run = [&](LatentAttention& layer, const Tensor& input) {
    const TrainingForward forward = layer.forward_training(context_, {.query = input});
    return elements_of(layer.backward(context_, input, forward.saved).query);
  };
  const std::vector<double> a = run(exact, wide);
  const std::vector<double> b = run(rounded, x);
  for (std::size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(b[i], a[i], 0.25);
}

LADON_FOR_EACH_CONTEXT(LatentGradient);

}  // namespace
}  // namespace ladon::test
