// Every tensor that a public function takes, one at a time, elsewhere than the call's Context: it
// is refused, and the message names it.
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ladon/ladon.h"
#include "support/device_fixture.h"

namespace ladon::test {
namespace {

/// Operands of attention() and its relatives, all of them on the host; `elsewhere()` replaces one
/// by a tensor like it on the device.
class AttentionOperands : public DeviceTest {
 protected:
  struct Views {
    ConstTensorView q, k, v, mask, bias, alibi_slopes, sinks, dout, dlse;
    TensorView out, lse, dq, dk, dv, dbias, dsinks;
  };

  Views views() {
    return {q_,   q_,   q_,   mask_, bias_, heads_, heads_, q_,
            lse_, out_, lse_, dq_,   dk_,   dv_,    dbias_, dsinks_};
  }
  static AttentionOptions options_of(const Views& views) {
    return {.mask = views.mask,
            .bias = views.bias,
            .alibi_slopes = views.alibi_slopes,
            .sinks = views.sinks};
  }

  /// run() with each of the operands elsewhere, in turn.
  template <class View>
  void expect_each_refused(const std::string& operation,
                           const std::vector<std::pair<std::string, View Views::*>>& operands,
                           const std::function<void(const Views&)>& run) {
    EXPECT_NO_THROW(run(views()));
    for (const auto& [name, operand] : operands) {
      Views changed = views();
      Tensor there = device((changed.*operand).dtype(), (changed.*operand).shape());
      changed.*operand = there.view();
      expect_refused(operation, name, [&] { run(changed); });
    }
  }

  Tensor mask_ = host(DType::kBool, {1, 1, 3, 3});
  Tensor bias_ = host(DType::kF32, {1, kHeads, 3, 3});
  Tensor heads_ = host(DType::kF32, {kHeads});
  Tensor dq_ = host(DType::kF32, q_.shape());
  Tensor dk_ = host(DType::kF32, q_.shape());
  Tensor dv_ = host(DType::kF32, q_.shape());
  Tensor dbias_ = host(DType::kF32, bias_.shape());
  Tensor dsinks_ = host(DType::kF32, {kHeads});
};

TEST_F(AttentionOperands, Forward) {
  const auto run = [&](const Views& views) {
    attention(cpu_, views.q, views.k, views.v, options_of(views), views.out, views.lse);
  };
  expect_each_refused<ConstTensorView>("attention",
                                       {{"q", &Views::q},
                                        {"k", &Views::k},
                                        {"v", &Views::v},
                                        {"mask", &Views::mask},
                                        {"bias", &Views::bias},
                                        {"alibi_slopes", &Views::alibi_slopes},
                                        {"sinks", &Views::sinks}},
                                       run);
  expect_each_refused<TensorView>("attention", {{"out", &Views::out}, {"lse", &Views::lse}}, run);
  expect_each_refused<ConstTensorView>(
      "attention", {{"q", &Views::q}, {"v", &Views::v}, {"bias", &Views::bias}},
      [&](const Views& views) { attention(cpu_, views.q, views.k, views.v, options_of(views)); });
}

TEST_F(AttentionOperands, OverACache) {
  KvCache cache = KvCache::contiguous(cpu_, {.num_kv_heads = kHeads, .head_dim = kDim});
  cache.append(cpu_, q_, q_);
  const auto run = [&](const Views& views) {
    attention(cpu_, views.q, cache.view(), options_of(views), views.out, views.lse);
  };
  expect_each_refused<ConstTensorView>("attention",
                                       {{"q", &Views::q},
                                        {"mask", &Views::mask},
                                        {"bias", &Views::bias},
                                        {"alibi_slopes", &Views::alibi_slopes},
                                        {"sinks", &Views::sinks}},
                                       run);
  expect_each_refused<TensorView>("attention", {{"out", &Views::out}, {"lse", &Views::lse}}, run);
  // The other way round. What is on the device is taken there, scales included.
  for (const DType format : {DType::kF32, DType::kI8}) {
    const KvCacheOptions options{.num_kv_heads = kHeads, .head_dim = kDim, .format = format};
    KvCache there = KvCache::contiguous(device_, options);
    there.append(device_, device_q_, device_q_);
    Tensor device_out = device(DType::kF32, q_.shape());
    EXPECT_NO_THROW(attention(device_, device_q_, there.view(), {}, device_out, device_lse_));
    expect_refused("attention", "cache.k", [&] { attention(cpu_, q_, there.view(), {}, out_); });
    expect_refused(
        "attention", "q", [&] { attention(device_, q_, there.view(), {}, device_out); }, true);
    expect_refused(
        "attention", "cache.k",
        [&] { attention(device_, device_q_, cache.view(), {}, device_out); }, true);
  }
}

TEST_F(AttentionOperands, Backward) {
  const auto run = [&](const Views& views) {
    attention_backward(cpu_, views.q, views.k, views.v, options_of(views),
                       {.out = views.out, .lse = views.lse, .dout = views.dout, .dlse = views.dlse},
                       {.dq = views.dq,
                        .dk = views.dk,
                        .dv = views.dv,
                        .dbias = views.dbias,
                        .dsinks = views.dsinks});
  };
  expect_each_refused<ConstTensorView>("attention_backward",
                                       {{"q", &Views::q},
                                        {"k", &Views::k},
                                        {"v", &Views::v},
                                        {"mask", &Views::mask},
                                        {"bias", &Views::bias},
                                        {"alibi_slopes", &Views::alibi_slopes},
                                        {"sinks", &Views::sinks},
                                        {"dout", &Views::dout},
                                        {"dlse", &Views::dlse}},
                                       run);
  expect_each_refused<TensorView>("attention_backward",
                                  {{"out", &Views::out},
                                   {"lse", &Views::lse},
                                   {"dq", &Views::dq},
                                   {"dk", &Views::dk},
                                   {"dv", &Views::dv},
                                   {"dbias", &Views::dbias},
                                   {"dsinks", &Views::dsinks}},
                                  run);
}

TEST_F(AttentionOperands, WeightsAndMerge) {
  expect_each_refused<ConstTensorView>("attention_weights",
                                       {{"q", &Views::q},
                                        {"k", &Views::k},
                                        {"mask", &Views::mask},
                                        {"bias", &Views::bias},
                                        {"alibi_slopes", &Views::alibi_slopes},
                                        {"sinks", &Views::sinks}},
                                       [&](const Views& views) {
                                         attention_weights(cpu_, views.q, views.k,
                                                           options_of(views), views.dbias);
                                       });
  Tensor weights = device(DType::kF32, bias_.shape());
  expect_refused("attention_weights", "weights",
                 [&] { attention_weights(cpu_, q_, q_, {}, weights); });
  Tensor merged_lse = host(DType::kF32, lse_.shape());
  const auto merge = [&](const Views& views) {
    const ConstTensorView outs[] = {q_, views.q};
    const ConstTensorView lses[] = {lse_, views.dlse};
    merge_attention(cpu_, outs, lses, views.out,
                    views.lse.device().is_cpu() ? merged_lse.view() : views.lse, views.sinks);
  };
  expect_each_refused<ConstTensorView>(
      "merge_attention",
      {{"outs[1]", &Views::q}, {"lses[1]", &Views::dlse}, {"sinks", &Views::sinks}}, merge);
  expect_each_refused<TensorView>("merge_attention", {{"out", &Views::out}, {"lse", &Views::lse}},
                                  merge);
}

class RopeOperands : public DeviceTest {
 protected:
  Tensor cos_ = host(DType::kF32, {5, kDim / 2});
  Tensor sin_ = host(DType::kF32, {5, kDim / 2});
  Tensor device_table_ = device(DType::kF32, {5, kDim / 2});
};

TEST_F(RopeOperands, RopeAndItsBackward) {
  const RopeTable table{cos_, sin_};
  EXPECT_NO_THROW(rope(cpu_, q_, {}, table, {}, out_));
  expect_refused("rope", "x", [&] { rope(cpu_, device_q_, {}, {}, out_); });
  expect_refused("rope", "out", [&] { rope(cpu_, q_, {}, {}, device_q_); });
  expect_refused("rope", "x", [&] { rope(cpu_, device_q_, {}, table, {}, out_); });
  expect_refused("rope", "out", [&] { rope(cpu_, q_, {}, table, {}, device_q_); });
  const RopeTable cos_there{device_table_, sin_};
  const RopeTable sin_there{cos_, device_table_};
  expect_refused("rope", "table.cos", [&] { rope(cpu_, q_, {}, cos_there, {}, out_); });
  expect_refused("rope", "table.sin", [&] { rope(cpu_, q_, {}, sin_there, {}, out_); });
  const std::string backward = "rope_backward";
  expect_refused(backward, "dout", [&] { rope_backward(cpu_, device_q_, {}, {}, out_); });
  expect_refused(backward, "dx", [&] { rope_backward(cpu_, q_, {}, {}, device_q_); });
  expect_refused(backward, "dout", [&] { rope_backward(cpu_, device_q_, {}, table, {}, out_); });
  expect_refused(backward, "dx", [&] { rope_backward(cpu_, q_, {}, table, {}, device_q_); });
  expect_refused(backward, "table.cos", [&] { rope_backward(cpu_, q_, {}, cos_there, {}, out_); });
  expect_refused(backward, "table.sin", [&] { rope_backward(cpu_, q_, {}, sin_there, {}, out_); });
  expect_refused("make_rope_table", "cos",
                 [&] { make_rope_table(cpu_, {}, kDim, device_table_, sin_); });
  expect_refused("make_rope_table", "sin",
                 [&] { make_rope_table(cpu_, {}, kDim, cos_, device_table_); });
}

class CacheOperands : public DeviceTest {};

TEST_F(CacheOperands, Rows) {
  const KvCacheOptions options{.num_kv_heads = kHeads, .head_dim = kDim};
  KvCache here = KvCache::contiguous(cpu_, options);
  KvCache there = KvCache::contiguous(device_, options);
  const std::string append = "KvCache::append";
  expect_refused(append, "k", [&] { KvAppend(cpu_, here, device_q_, q_); });
  expect_refused(append, "v", [&] { KvAppend(cpu_, here, q_, device_q_); });
  expect_refused(
      append, "k", [&] { there.append(device_, q_, device_q_); }, true);
  expect_refused(
      append, "v", [&] { there.append(device_, device_q_, q_); }, true);
  expect_refused(
      append, "cache", [&] { here.append(device_, device_q_, device_q_); }, true);
  there.append(device_, device_q_, device_q_);
  expect_refused("KvCache::keys", "cache", [&] { there.keys(cpu_); });
  expect_refused("KvCache::values", "cache", [&] { there.values(cpu_); });
  EXPECT_EQ(here.length(), 0);
}

class LayerOperands : public DeviceTest {
 protected:
  MultiHeadAttention multi_head_{{.embed_dim = 8, .num_heads = 2, .causal = true}};
  LatentAttention latent_{
      {.embed_dim = 8, .num_heads = 2, .kv_rank = 3, .nope_dim = 4, .rope_dim = 2, .causal = true}};
};

TEST_F(LayerOperands, WholeSequences) {
  const Tensor mask = device(DType::kBool, {1, 1, 3, 3});
  const Tensor bias = device(DType::kF32, {1, 1, 3, 3});
  for (AttentionLayer* layer :
       {static_cast<AttentionLayer*>(&multi_head_), static_cast<AttentionLayer*>(&latent_)}) {
    const std::string forward = std::string(layer->type_name()) + "::forward";
    const auto refused = [&](const char* argument, const LayerInputs& inputs,
                             const LayerCall& call = {}) {
      expect_refused(forward, argument, [&] { layer->forward(cpu_, inputs, call); });
      expect_refused(forward, argument, [&] { layer->forward_training(cpu_, inputs, call); });
    };
    refused("query", {.query = device_x_});
    refused("key", {.query = x_, .key = device_x_});
    refused("mask", {.query = x_}, {.mask = mask});
    refused("bias", {.query = x_}, {.bias = bias});
    expect_refused(forward, "out", [&] { layer->forward(cpu_, x_, {}, device_x_); });
    expect_refused(forward, "out",
                   [&] { layer->forward_training(cpu_, {.query = x_}, {}, device_x_); });
    layer->to(device_);
    expect_refused(
        forward, "out", [&] { layer->forward(device_, device_x_, {}, x_); }, true);
    expect_refused(
        forward, "query", [&] { layer->forward(device_, x_); }, true);
    layer->to(cpu_);
  }
  expect_refused("MultiHeadAttention::forward", "value",
                 [&] { multi_head_.forward(cpu_, {.query = x_, .key = x_, .value = device_x_}); });
}

TEST_F(LayerOperands, GradientsOfInputs) {
  for (AttentionLayer* layer :
       {static_cast<AttentionLayer*>(&multi_head_), static_cast<AttentionLayer*>(&latent_)}) {
    const std::string backward = std::string(layer->type_name()) + "::backward";
    const bool has_value = layer == &multi_head_;
    LayerInputs inputs{.query = x_, .key = x_};
    if (has_value) inputs.value = x_;
    const SavedForward saved = layer->forward_training(cpu_, inputs).saved;
    const auto refused = [&](const char* argument, const InputGradientViews& gradients) {
      expect_refused(backward, argument, [&] { layer->backward(cpu_, x_, saved, gradients); });
    };
    refused("gradients.query", {.query = device_x_});
    refused("gradients.key", {.key = device_x_});
    if (has_value) refused("gradients.value", {.value = device_x_});
    for (const Parameter& parameter : layer->named_parameters()) {
      EXPECT_EQ(parameter.gradient.rank(), 0) << parameter.name;
    }
  }
}

TEST_F(LayerOperands, CachedCalls) {
  const Tensor mask = device(DType::kBool, {1, 1, 3, 3});
  const Tensor bias = device(DType::kF32, {1, 1, 3, 3});
  for (AttentionLayer* layer :
       {static_cast<AttentionLayer*>(&multi_head_), static_cast<AttentionLayer*>(&latent_)}) {
    layer->eval();
    const std::string forward = std::string(layer->type_name()) + "::forward";
    KvCache cache = KvCache::contiguous(cpu_, layer->cache_options());
    const auto refused = [&](const char* argument, const CachedCall& call) {
      expect_refused(forward, argument, [&] { layer->forward(cpu_, x_, cache, call); });
      expect_refused(forward, argument, [&] { layer->forward_from(cpu_, x_, cache, call); });
    };
    refused("mask", {.mask = mask});
    refused("bias", {.bias = bias});
    refused("query", {.query = device_x_});
    expect_refused(forward, "x", [&] { layer->forward_from(cpu_, device_x_, cache); });
    expect_refused(
        "KvCache::fork", "cache", [&] { layer->forward_from(device_, device_x_, cache); }, true);
    EXPECT_EQ(cache.length(), 0);
  }
}

TEST_F(LayerOperands, StepsOfLatentAttention) {
  const Tensor latents = device(DType::kF32, {1, 3, latent_.latent_dim()});
  expect_refused("LatentAttention::compress", "x", [&] { latent_.compress(cpu_, device_x_); });
  expect_refused("LatentAttention::expand_keys", "latents",
                 [&] { latent_.expand_keys(cpu_, latents); });
  expect_refused("LatentAttention::expand_values", "latents",
                 [&] { latent_.expand_values(cpu_, latents); });
}

TEST_F(LayerOperands, OptimisersWhoseLayerHasMoved) {
  for (Parameter& parameter : multi_head_.named_parameters()) parameter.make_gradient(cpu_);
  AdamW adamw(cpu_, multi_head_.parameters(), {});
  multi_head_.to(device_);
  expect_refused("AdamW::step", "parameters[0].value (q_proj.weight)", [&] { adamw.step(cpu_); });
  expect_refused(
      "AdamW::step", "optimiser", [&] { adamw.step(device_); }, true);
  multi_head_.to(cpu_);
  EXPECT_NO_THROW(adamw.step(cpu_));
}

TEST_F(LayerOperands, OptimisersWhoseParameterHasMoved) {
  const auto moved_after = [&](const std::function<void(Parameter&)>& make_and_step) {
    Parameter weight = Parameter::zeros("w", DType::kBF16, {3});
    make_and_step(weight);
  };
  moved_after([&](Parameter& weight) {
    Sgd sgd(cpu_, {&weight}, {.momentum = 0.5});
    weight = weight.to(device_);
    expect_refused(
        "Sgd::step", "optimiser", [&] { sgd.step(device_); }, true);
  });
  moved_after([&](Parameter& weight) {
    AdamW adamw(cpu_, {&weight}, {});
    weight = weight.to(device_);
    expect_refused(
        "AdamW::step", "optimiser", [&] { adamw.step(device_); }, true);
    EXPECT_EQ(adamw.steps_taken(), 0);
  });
  moved_after([&](Parameter& weight) {
    AdamW adamw(cpu_, {&weight}, {});
    weight.gradient = weight.gradient.to(device_);
    const std::string gradient = "parameters[0].gradient (w)";
    expect_refused("AdamW::step", gradient, [&] { adamw.step(cpu_); });
    Parameter* const pointers[] = {&weight};
    expect_refused("clip_gradients", gradient, [&] { clip_gradients(cpu_, pointers, 1); });
    expect_refused("Sgd", gradient, [&] { Sgd(cpu_, {&weight}, {}); });
    const auto restore_refused = [&](const char* argument, Tensor AdamW::Moments::*moment) {
      std::vector<AdamW::Moments> moments(1);
      moments[0].first = host(DType::kF32, {3});
      moments[0].second = host(DType::kF32, {3});
      moments[0].master = host(DType::kF32, {3});
      moments[0].*moment = device(DType::kF32, {3});
      expect_refused("AdamW::restore", argument, [&] { adamw.restore(1, std::move(moments)); });
    };
    restore_refused("moments[0].first", &AdamW::Moments::first);
    restore_refused("moments[0].second", &AdamW::Moments::second);
    restore_refused("moments[0].master", &AdamW::Moments::master);
  });
}

}  // namespace
}  // namespace ladon::test
