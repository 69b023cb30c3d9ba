// Gradients of MultiHeadAttention against finite differences of its forward pass, in f64: inputs,
// every weight and every bias, for each option and for MHA, GQA and MQA.

#include <gtest/gtest.h>

#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/finite_differences.h"

namespace ladon::test {
namespace {

struct LayerCase {
  std::string name;
  MultiHeadAttentionOptions options;
  bool cross = false;
  bool own_value = false;
  std::int64_t query_len = 4;
  std::int64_t kv_len = 4;
  bool lengths = false;
  bool masked = false;
};

std::vector<LayerCase> every_case() {
  const MultiHeadAttentionOptions base{
      .embed_dim = 6, .num_heads = 4, .num_kv_heads = 2, .head_dim = 4, .dtype = DType::kF64};
  std::vector<LayerCase> setups;
  const auto with = [&](const std::string& name, const std::function<void(LayerCase&)>& change) {
    for (const std::int64_t kv_heads : {4, 2, 1}) {
      LayerCase setup{.name = name + ", " + std::to_string(kv_heads) + " KV heads",
                      .options = base};
      setup.options.num_kv_heads = kv_heads;
      change(setup);
      setups.push_back(setup);
    }
  };
  const auto biases = [](LayerCase& s) {
    s.options.query_bias = s.options.key_bias = s.options.value_bias = s.options.out_bias = true;
  };
  with("self", [](LayerCase&) {});
  with("biases", biases);
  with("causal", [](LayerCase& s) { s.options.causal = true; });
  with("cross", [&](LayerCase& s) {
    biases(s);
    s.cross = true;
    s.kv_len = 7;
    s.options.key_dim = 5;
  });
  with("cross with values of their own", [&](LayerCase& s) {
    biases(s);
    s.cross = s.own_value = true;
    s.kv_len = 3;
    s.options.key_dim = 5;
    s.options.value_input_dim = 7;
  });
  with("rope", [](LayerCase& s) { s.options.rope = RopeOptions{}; });
  with("partial interleaved rope", [](LayerCase& s) {
    s.options.rope = RopeOptions{.layout = RopeLayout::kInterleaved, .rotary_dim = 2};
  });
  with("rope with explicit frequencies", [](LayerCase& s) {
    s.options.rope = RopeOptions{.rotary_dim = 4, .frequencies = {0.7, 0.2}, .magnitude = 1.5};
  });
  with("norm", [](LayerCase& s) { s.options.qk_norm = true; });
  with("norm over all heads", [](LayerCase& s) {
    s.options.qk_norm = true;
    s.options.qk_norm_span = QkNormSpan::kAllHeads;
  });
  with("layer norm of each head", [](LayerCase& s) {
    s.options.qk_norm = true;
    s.options.qk_norm_span = QkNormSpan::kEachHead;
    s.options.qk_norm_centered = true;
    s.options.rope = RopeOptions{};
  });
  with("norm with an offset", [](LayerCase& s) {
    s.options.qk_norm = true;
    s.options.qk_norm_offset = 0.7;
  });
  with("norm and rope", [](LayerCase& s) {
    s.options.qk_norm = true;
    s.options.rope = RopeOptions{};
  });
  with("softcap", [](LayerCase& s) { s.options.softcap = 1.2; });
  with("scale", [](LayerCase& s) { s.options.scale = 0.9; });
  with("window", [](LayerCase& s) {
    s.options.window_left = 1;
    s.options.window_right = 2;
  });
  with("sinks", [](LayerCase& s) { s.options.sinks = true; });
  with("ALiBi", [](LayerCase& s) { s.options.alibi_slopes = {0.5, 0.1, -0.2, 1}; });
  with("dropout", [](LayerCase& s) { s.options.dropout = 0.4; });
  with("lengths", [](LayerCase& s) { s.lengths = true; });
  with("mask and bias", [](LayerCase& s) { s.masked = true; });
  with("one position", [&](LayerCase& s) {
    biases(s);
    s.query_len = s.kv_len = 1;
  });
  with("everything", [&](LayerCase& s) {
    biases(s);
    s.options.causal = true;
    s.options.rope = RopeOptions{};
    s.options.qk_norm = true;
    s.options.softcap = 2;
    s.options.window_left = 3;
    s.options.sinks = true;
    s.options.alibi_slopes = {0.3, 0.2, 0.1, 0};
    s.options.dropout = 0.2;
    s.query_len = s.kv_len = 6;
  });
  return setups;
}

class Experiment {
 public:
  Experiment(const Context& context, const LayerCase& setup)
      : context_(context),
        layer_(setup.options, 5),
        query_(random_tensor({2, setup.query_len, setup.options.embed_dim}, 1)),
        grad_out_(random_tensor({2, setup.query_len, setup.options.embed_dim}, 2)) {
    layer_.to(context_);
    // Biases, sinks and norms start at 0 or 1, where mistakes may hide.
    std::uint64_t stream = 10;
    for (Parameter& parameter : layer_.named_parameters()) {
      if (parameter.value.rank() == 1)
        fill_uniform(context_, parameter.value, 0.3, 1.4, 3, stream++);
    }
    inputs_.query = query_;
    if (setup.cross) {
      key_ = random_tensor({2, setup.kv_len, layer_.key_dim()}, 3);
      inputs_.key = key_;
    }
    if (setup.own_value) {
      value_ = random_tensor({2, setup.kv_len, layer_.value_input_dim()}, 4);
      inputs_.value = value_;
    }
    call_.dropout_seed = 77;
    if (setup.lengths) call_.kv_lengths = kLengths;
    if (setup.masked) {
      mask_ = Tensor(context_, DType::kBool, {1, 1, setup.query_len, setup.kv_len});
      std::vector<double> seen;
      for (std::int64_t i = 0; i < mask_.num_elements(); ++i) seen.push_back(i % 3 != 0 ? 1 : 0);
      set_elements(context_, mask_, seen);
      bias_ = random_tensor({2, 1, 1, setup.kv_len}, 6);
      call_.mask = mask_;
      call_.bias = bias_;
    }
  }

  void check() {
    const TrainingForward forward = layer_.forward_training(context_, inputs_, call_);
    const InputGradients gradients = layer_.backward(context_, grad_out_, forward.saved);
    check_tensor(query_, gradients.query, "query");
    if (key_.rank() != 0) check_tensor(key_, gradients.key, "key");
    if (value_.rank() != 0) check_tensor(value_, gradients.value, "value");
    for (Parameter& parameter : layer_.named_parameters()) {
      check_tensor(parameter.value, parameter.gradient, parameter.name);
    }
  }

 private:
  static constexpr std::int64_t kLengths[] = {3, 1};

  Tensor random_tensor(const Dims& shape, std::uint64_t stream) const {
    Tensor tensor(context_, DType::kF64, shape);
    fill_normal(context_, tensor, 0, 1, 9, stream);
    return tensor;
  }

  double loss() const {
    const std::vector<double> out = elements_of(layer_.forward(context_, inputs_, call_));
    const std::vector<double> grad = elements_of(grad_out_);
    return std::inner_product(out.begin(), out.end(), grad.begin(), 0.0);
  }

  void check_tensor(Tensor& tensor, const Tensor& gradient, const std::string& name) const {
    ASSERT_EQ(tensor.shape(), gradient.shape()) << name;
    const std::vector<double> got = elements_of(gradient);
    const std::vector<double> expected = slopes_of(context_, tensor, [&] { return loss(); });
    for (std::size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], expected[i], 1e-7) << name << '[' << i << ']';
    }
  }

  const Context& context_;
  MultiHeadAttention layer_;
  Tensor query_, key_, value_, grad_out_, mask_, bias_;
  LayerInputs inputs_;
  LayerCall call_;
};

class MultiHeadGradient : public ContextTest {};

TEST_P(MultiHeadGradient, AgreesWithFiniteDifferences) {
  // One thread: thousands of tiny calls.
  const Context context = GetParam().context(1);
  for (const LayerCase& setup : every_case()) {
    SCOPED_TRACE(setup.name);
    Experiment(context, setup).check();
  }
}

TEST_P(MultiHeadGradient, OfOnePositionIsGradTimesWoTimesWv) {
  // attention is the identity: out = W_o S W_v x, where S gives each query head its KV head's
  // value.
  for (const std::int64_t kv_heads : {4, 2, 1}) {
    MultiHeadAttention layer = there(MultiHeadAttention({.embed_dim = 8,
                                                         .num_heads = 4,
                                                         .num_kv_heads = kv_heads,
                                                         .head_dim = 3,
                                                         .dtype = DType::kF64},
                                                        3));
    const Tensor x = normal(DType::kF64, {1, 8}, 1);
    const Tensor grad = normal(DType::kF64, {1, 8}, 2);
    const TrainingForward forward = layer.forward_training(context_, {.query = x});
    const InputGradients gradients = layer.backward(context_, grad, forward.saved);
    const auto out_weight = elements_of(layer.parameter("out_proj.weight").value);
    const auto value_weight = elements_of(layer.parameter("v_proj.weight").value);
    const auto dout = elements_of(grad);
    const auto got = elements_of(gradients.query);
    const auto group = static_cast<std::size_t>(4 / kv_heads);
    for (std::size_t in = 0; in < 8; ++in) {
      double expected = 0;
      for (std::size_t out = 0; out < 8; ++out) {
        for (std::size_t column = 0; column < 12; ++column) {
          const std::size_t value_row = column / 3 / group * 3 + column % 3;
          expected += dout[out] * out_weight[out * 12 + column] * value_weight[value_row * 8 + in];
        }
      }
      EXPECT_NEAR(got[in], expected, 1e-12);
    }
    for (const char* name : {"q_proj.weight", "k_proj.weight"}) {
      for (const double element : elements_of(layer.parameter(name).gradient)) {
        EXPECT_EQ(element, 0);
      }
    }
  }
}

TEST_P(MultiHeadGradient, AddsToWhatIsThere) {
  MultiHeadAttention layer =
      there(MultiHeadAttention({.embed_dim = 8, .num_heads = 2, .out_bias = true}, 3));
  const Tensor x = normal(DType::kF32, {2, 5, 8}, 1);
  const TrainingForward forward = layer.forward_training(context_, {.query = x});
  layer.backward(context_, x, forward.saved);
  std::vector<std::vector<double>> once;
  for (const Parameter& parameter : layer.named_parameters()) {
    once.push_back(elements_of(parameter.gradient));
  }
  layer.backward(context_, x, forward.saved);
  for (std::size_t i = 0; i < once.size(); ++i) {
    const std::vector<double> twice = elements_of(layer.named_parameters()[i].gradient);
    for (std::size_t n = 0; n < twice.size(); ++n) EXPECT_EQ(twice[n], 2 * once[i][n]);
  }
  layer.zero_grad(context_);
  EXPECT_EQ(elements_of(layer.parameter("q_proj.weight").gradient)[0], 0);
}

LADON_FOR_EACH_CONTEXT(MultiHeadGradient);

}  // namespace
}  // namespace ladon::test
