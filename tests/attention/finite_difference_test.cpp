// Gradients against finite differences of the forward pass, in f64, for every option.
//
// The loss is sum(out * dout) + sum(lse * dlse) over rows that see something. Each checked element
// is moved by +-h; the central difference is right to about h^2, and to 1e-16 / h.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "ladon/attention.h"
#include "support/case_data.h"
#include "support/contexts.h"
#include "support/host_calls.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

struct NamedCase {
  std::string name;
  Case problem;
};

std::vector<NamedCase> every_option() {
  const Case base{.batch = 2,
                  .query_len = 5,
                  .kv_len = 7,
                  .num_heads = 4,
                  .num_kv_heads = 2,
                  .head_dim = 3,
                  .value_dim = 4,
                  .dtype = DType::kF64,
                  .kv_dtype = DType::kF64,
                  .bias_dtype = DType::kF64,
                  .seed = 42};
  std::vector<NamedCase> cases;
  const auto with = [&](const std::string& name, const std::function<void(Case&)>& change) {
    Case problem = base;
    change(problem);
    cases.push_back({name, problem});
  };
  with("plain", [](Case&) {});
  with("mha", [](Case& c) { c.num_kv_heads = 4; });
  with("mqa", [](Case& c) { c.num_kv_heads = 1; });
  with("scale", [](Case& c) { c.scale = -0.7; });
  with("causal", [](Case& c) { c.causal = true; });
  with("causal top-left", [](Case& c) {
    c.causal = true;
    c.alignment = Alignment::kTopLeft;
  });
  with("window", [](Case& c) {
    c.window_left = 2;
    c.window_right = 1;
  });
  with("mask", [](Case& c) { c.mask.present = true; });
  for (int dims = 0; dims < 16; ++dims) {
    with("bias " + std::to_string(dims), [&](Case& c) {
      c.bias.present = true;
      for (std::size_t i = 0; i < 4; ++i) c.bias.full[i] = ((dims >> i) & 1) != 0;
    });
  }
  with("padded", [](Case& c) { c.lengths = Lengths::kPadded; });
  with("packed", [](Case& c) { c.lengths = Lengths::kPacked; });
  with("softcap", [](Case& c) { c.softcap = 1.5; });
  with("alibi", [](Case& c) { c.alibi = true; });
  with("sinks", [](Case& c) { c.sinks = true; });
  with("dropout", [](Case& c) { c.dropout = 0.4; });
  with("dlse", [](Case& c) { c.dlse = true; });
  with("everything", [](Case& c) {
    c.causal = true;
    c.window_left = 4;
    c.mask = {.present = true, .full = {false, true, true, true}};
    c.bias = {.present = true, .full = {false, true, false, true}};
    c.lengths = Lengths::kPacked;
    c.softcap = 2;
    c.alibi = true;
    c.sinks = true;
    c.dropout = 0.2;
    c.dlse = true;
    c.kv_len = 70;
    c.query_len = 9;
  });
  return cases;
}

/// The inputs of a case as tensors that can be moved, and the loss over them.
class DifferenceCheck {
 public:
  DifferenceCheck(const Context& context, const CaseData& data)
      : context_(context),
        options_(data.options()),
        q(Tensor::copy_of(host_context(), data.q())),
        k(Tensor::copy_of(host_context(), data.k())),
        v(Tensor::copy_of(host_context(), data.v())),
        dout_(Tensor::copy_of(host_context(), data.dout())),
        out_(DType::kF64, data.out_shape()),
        lse_(DType::kF64, data.lse_shape()) {
    if (!data.dlse().absent()) dlse_ = Tensor::copy_of(host_context(), data.dlse());
    if (!options_.bias.absent()) {
      bias = Tensor::copy_of(host_context(), options_.bias);
      options_.bias = bias;
    }
    if (!options_.sinks.absent()) {
      sinks = Tensor::copy_of(host_context(), options_.sinks, DType::kF64);
      options_.sinks = sinks;
    }
  }

  double loss() {
    host_attention(context_, q, k, v, options_, out_, lse_);
    double sum = 0;
    for (std::int64_t i = 0; i < out_.num_elements(); ++i) {
      sum += out_.data_as<double>()[i] * dout_.data_as<double>()[i];
    }
    for (std::int64_t i = 0; dlse_.rank() != 0 && i < lse_.num_elements(); ++i) {
      if (std::isinf(lse_.data_as<double>()[i])) continue;
      sum += lse_.data_as<double>()[i] * dlse_.data_as<double>()[i];
    }
    return sum;
  }

  /// Compares every element of one gradient.
  void check(Tensor& input, const Tensor& gradient, const std::string& name) {
    constexpr double kStep = 1e-5;
    if (input.rank() == 0) return;
    for (std::int64_t i = 0; i < input.num_elements(); ++i) {
      double& element = input.data_as<double>()[i];
      if (!std::isfinite(element)) continue;  // poison, or a bias that masks
      const double kept = element;
      element = kept + kStep;
      const double above = loss();
      element = kept - kStep;
      const double below = loss();
      element = kept;
      EXPECT_NEAR(gradient.data_as<double>()[i], (above - below) / (2 * kStep), 2e-8)
          << name << '[' << i << ']';
    }
  }

  void check_all() {
    loss();
    Tensor dq(DType::kF64, q.shape());
    Tensor dk(DType::kF64, k.shape());
    Tensor dv(DType::kF64, v.shape());
    AttentionGradients gradients{.dq = dq, .dk = dk, .dv = dv};
    Tensor dbias;
    Tensor dsinks;
    if (bias.rank() != 0) {
      dbias = Tensor(DType::kF64, bias.shape());
      gradients.dbias = dbias;
    }
    if (sinks.rank() != 0) {
      dsinks = Tensor(DType::kF64, sinks.shape());
      gradients.dsinks = dsinks;
    }
    AttentionSaved saved{.out = out_, .lse = lse_, .dout = dout_};
    if (dlse_.rank() != 0) saved.dlse = dlse_;
    host_attention_backward(context_, q, k, v, options_, saved, gradients);
    check(q, dq, "dq");
    check(k, dk, "dk");
    check(v, dv, "dv");
    check(bias, dbias, "dbias");
    check(sinks, dsinks, "dsinks");
  }

 private:
  const Context& context_;
  AttentionOptions options_;

 public:
  Tensor q, k, v, bias, sinks;

 private:
  Tensor dout_, dlse_, out_, lse_;
};

class FiniteDifference : public ContextTest {};

TEST_P(FiniteDifference, EveryOption) {
  for (const NamedCase& named : every_option()) {
    SCOPED_TRACE(named.name);
    const CaseData data(named.problem);
    DifferenceCheck(context_, data).check_all();
  }
}

LADON_FOR_EACH_CONTEXT(FiniteDifference);

}  // namespace
}  // namespace ladon::test
