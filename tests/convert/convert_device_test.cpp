// Conversions of layers that are on a device, with inputs there: the host's results, on the
// Context's device; and what is elsewhere than the Context is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "ladon/convert.h"
#include "ladon/random.h"
#include "support/contexts.h"
#include "support/device_fixture.h"

namespace ladon::test {
namespace {

class ConvertOnDevice : public DeviceTest {
 protected:
  ConvertOnDevice() { fill_normal(cpu_, inputs_, 0, 1, 5); }

  /// A layer's weights, and what it does to some inputs.
  static std::vector<std::vector<double>> weights_of(const AttentionLayer& layer) {
    std::vector<std::vector<double>> weights;
    for (const Parameter& parameter : layer.named_parameters()) {
      weights.push_back(elements_of(parameter.value));
    }
    return weights;
  }
  template <class Layer>
  static Layer moved(Layer layer, const Context& context) {
    layer.to(context);
    return layer;
  }

  MultiHeadAttention layer_{{.embed_dim = 8, .num_heads = 4, .causal = true, .rope = RopeOptions{}},
                            3};
  Tensor inputs_ = host(DType::kF32, {4, 40, 8});
};

TEST_F(ConvertOnDevice, ResultsAreThoseOfTheHost) {
  const MultiHeadAttention layer_there = moved(layer_, device_);
  const Tensor x_there = inputs_.to(device_);
  Calibration here(8);
  Calibration there(8);
  here.add(cpu_, inputs_);
  there.add(device_, x_there);
  there.merge(Calibration(8));
  const GqaConversion gqa{.num_kv_heads = 2};
  const MlaConversion mla{.kv_rank = 6, .rope_dim = 2};
  const auto expect_same = [&](const AttentionLayer& on_device, const AttentionLayer& on_host) {
    EXPECT_EQ(on_device.device(), kPretendedDevice);
    EXPECT_EQ(on_host.device(), DeviceId());
    EXPECT_EQ(weights_of(on_device), weights_of(on_host));
  };
  ConvertedMultiHead few = to_gqa(cpu_, layer_, gqa, &here);
  ConvertedMultiHead few_there = to_gqa(device_, layer_there, gqa, &there);
  expect_same(few_there.layer, few.layer);
  const ConvertedLatent latent = to_mla(cpu_, layer_, mla, &here);
  const ConvertedLatent latent_there = to_mla(device_, layer_there, mla, &there);
  expect_same(latent_there.layer, latent.layer);
  expect_same(balance_channels(device_, layer_there, &there).layer,
              balance_channels(cpu_, layer_, &here).layer);
  expect_same(to_mha(device_, layer_there), to_mha(cpu_, layer_));
  expect_same(to_mqa(device_, latent_there.layer), to_mqa(cpu_, latent.layer));

  OutputFit fit(layer_, few.layer);
  OutputFit fit_there(layer_there, few_there.layer);
  fit.add(cpu_, inputs_);
  fit_there.add(device_, x_there);
  fit.apply(cpu_, few.layer);
  fit_there.apply(device_, few_there.layer);
  expect_same(few_there.layer, few.layer);
  const LayerComparison compared = compare_layers(cpu_, layer_, few.layer, inputs_);
  EXPECT_GT(compared.output_error, 0);
  EXPECT_EQ(compare_layers(device_, layer_there, few_there.layer, x_there).output_error,
            compared.output_error);
}

TEST_F(ConvertOnDevice, LayersThatAreElsewhereAreRefused) {
  const LatentAttention latent(
      {.embed_dim = 8, .num_heads = 2, .kv_rank = 6, .nope_dim = 4, .rope_dim = 2}, 4);
  const MultiHeadAttention layer_there = moved(layer_, device_);
  const LatentAttention latent_there = moved(latent, device_);
  // The host's layers as well: only the inputs of a calibration are taken from there.
  for (const bool on_device : {false, true}) {
    const Context& context = on_device ? device_ : cpu_;
    const MultiHeadAttention& heads = on_device ? layer_ : layer_there;
    const LatentAttention& latents = on_device ? latent : latent_there;
    const auto refused = [&](const char* operation, const std::function<void()>& call) {
      expect_refused(operation, "layer", call, on_device);
    };
    refused("to_mha", [&] { to_mha(context, heads); });
    refused("to_mha", [&] { to_mha(context, latents); });
    refused("to_mqa", [&] { to_mqa(context, latents); });
    for (const std::int64_t kv_heads : {2, 4}) {  // merged, and as they are
      refused("to_gqa", [&] { to_gqa(context, heads, {.num_kv_heads = kv_heads}); });
    }
    refused("to_mla", [&] { to_mla(context, heads); });
    refused("reduce_rank", [&] { reduce_rank(context, latents); });
    refused("balance_channels", [&] { balance_channels(context, heads); });
  }
}

TEST_F(ConvertOnDevice, WhatIsElsewhereIsRefused) {
  const MultiHeadAttention layer_there = moved(layer_, device_);
  const Tensor x_there = inputs_.to(device_);
  Calibration calibration(8);
  expect_refused("Calibration::add", "x", [&] { calibration.add(cpu_, x_there); });
  EXPECT_NO_THROW(calibration.add(device_, inputs_));  // the host's is taken everywhere
  expect_refused("compare_layers", "x", [&] { compare_layers(cpu_, layer_, layer_, x_there); });
  expect_refused("compare_layers", "before",
                 [&] { compare_layers(cpu_, layer_there, layer_, inputs_); });
  expect_refused("compare_layers", "after",
                 [&] { compare_layers(cpu_, layer_, layer_there, inputs_); });
  OutputFit fit(layer_, layer_);
  expect_refused("OutputFit::add", "x", [&] { fit.add(cpu_, x_there); });
  OutputFit before_there(layer_there, layer_);
  expect_refused("OutputFit::add", "before", [&] { before_there.add(cpu_, inputs_); });
  OutputFit after_there(layer_, layer_there);
  expect_refused("OutputFit::add", "after", [&] { after_there.add(cpu_, inputs_); });
  fit.add(cpu_, inputs_);
  MultiHeadAttention target = moved(layer_, device_);
  expect_refused("OutputFit::apply", "after", [&] { fit.apply(cpu_, target); });
}

}  // namespace
}  // namespace ladon::test
