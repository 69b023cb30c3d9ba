// Calls over ranks with an operand, a layer or a cache elsewhere than the Context: refused, by
// name.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>

#include "ladon/ladon.h"
#include "ladon/parallel_checkpoint.h"
#include "support/device_fixture.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kTokens = 4;

/// One rank; the others would refuse the same.
class RankOperands : public DeviceTest {
 protected:
  RankOperands() : ranks_(make_thread_communicators(1)) {}
  Communicator& rank() { return *ranks_.front(); }

  std::vector<std::unique_ptr<Communicator>> ranks_;
  Tensor part_ = host(DType::kF32, {3});
  Tensor all_ = host(DType::kF32, {1, 3});
  Tensor device_part_ = device(DType::kF32, {3});
  Tensor device_all_ = device(DType::kF32, {1, 3});
};

TEST_F(RankOperands, Collectives) {
  expect_refused("all_gather", "part", [&] { all_gather(cpu_, rank(), device_part_, all_); });
  expect_refused("all_gather", "all", [&] { all_gather(cpu_, rank(), part_, device_all_); });
  Tensor other = host(DType::kF32, {1, 3});
  expect_refused("all_to_all", "parts", [&] { all_to_all(cpu_, rank(), device_all_, other); });
  expect_refused("all_to_all", "received", [&] { all_to_all(cpu_, rank(), all_, device_all_); });
  expect_refused("reduce_scatter", "parts",
                 [&] { reduce_scatter(cpu_, rank(), device_all_, part_); });
  expect_refused("reduce_scatter", "sum",
                 [&] { reduce_scatter(cpu_, rank(), all_, device_part_); });
  expect_refused("all_reduce", "terms", [&] { all_reduce(cpu_, rank(), device_all_, other); });
  expect_refused("all_reduce", "sum", [&] { all_reduce(cpu_, rank(), all_, device_all_); });
}

TEST_F(RankOperands, ContextParallelAttention) {
  const Dims shape{1, kTokens, kHeads, kDim};
  const Tensor q = host(DType::kF32, shape);
  const Tensor there = device(DType::kF32, shape);
  Tensor out = host(DType::kF32, shape);
  Tensor device_out = device(DType::kF32, shape);
  Tensor lse = host(DType::kF32, {1, kHeads, kTokens});
  Tensor device_lse = device(DType::kF32, lse.shape());
  const Tensor per_head = host(DType::kF32, {kHeads});
  Tensor device_per_head = device(DType::kF32, {kHeads});
  const Tensor bias = host(DType::kF32, {1, 1, kTokens, kTokens});
  Tensor device_bias = device(DType::kF32, bias.shape());
  const Tensor mask = device(DType::kBool, bias.shape());
  const ContextPlan plan = plan_context(1, kTokens, kTokens);
  const std::string forward = "context_parallel_attention";
  const auto refused = [&](const char* argument, const ConstTensorView& a, const ConstTensorView& b,
                           const ConstTensorView& c, const AttentionOptions& options,
                           const TensorView& to, const TensorView& to_lse = {}) {
    expect_refused(forward, argument, [&] {
      context_parallel_attention(cpu_, rank(), a, b, c, options, plan, to, to_lse);
    });
  };
  refused("q", there, q, q, {}, out);
  refused("k", q, there, q, {}, out);
  refused("v", q, q, there, {}, out);
  refused("out", q, q, q, {}, device_out);
  refused("lse", q, q, q, {}, out, device_lse);
  refused("mask", q, q, q, {.mask = mask}, out);
  refused("bias", q, q, q, {.bias = device_bias}, out);
  refused("alibi_slopes", q, q, q, {.alibi_slopes = device_per_head}, out);
  refused("sinks", q, q, q, {.sinks = device_per_head}, out);

  const AttentionSaved saved{.out = out, .lse = lse, .dout = q};
  const AttentionOptions options{.bias = bias, .sinks = per_head};
  Tensor dq = host(DType::kF32, shape);
  const AttentionGradients wanted{.dq = dq};
  const std::string backward = "context_parallel_attention_backward";
  const auto input_refused = [&](const char* argument, const ConstTensorView& a,
                                 const ConstTensorView& b, const ConstTensorView& c,
                                 const AttentionOptions& own_options) {
    expect_refused(backward, argument, [&] {
      context_parallel_attention_backward(cpu_, rank(), a, b, c, own_options, plan, saved, wanted);
    });
  };
  input_refused("q", there, q, q, {});
  input_refused("k", q, there, q, {});
  input_refused("v", q, q, there, {});
  input_refused("mask", q, q, q, {.mask = mask});
  input_refused("bias", q, q, q, {.bias = device_bias});
  input_refused("alibi_slopes", q, q, q, {.alibi_slopes = device_per_head});
  input_refused("sinks", q, q, q, {.sinks = device_per_head});
  const auto backward_refused = [&](const char* argument, const AttentionSaved& kept,
                                    const AttentionGradients& gradients) {
    expect_refused(backward, argument, [&] {
      context_parallel_attention_backward(cpu_, rank(), q, q, q, options, plan, kept, gradients);
    });
  };
  backward_refused("out", {.out = there, .lse = lse, .dout = q}, wanted);
  backward_refused("lse", {.out = out, .lse = device_lse, .dout = q}, wanted);
  backward_refused("dout", {.out = out, .lse = lse, .dout = there}, wanted);
  backward_refused("dlse", {.out = out, .lse = lse, .dout = q, .dlse = device_lse}, wanted);
  backward_refused("dq", saved, {.dq = device_out});
  backward_refused("dk", saved, {.dk = device_out});
  backward_refused("dv", saved, {.dv = device_out});
  backward_refused("dbias", saved, {.dbias = device_bias});
  backward_refused("dsinks", saved, {.dsinks = device_per_head});
}

TEST_F(RankOperands, SpreadCaches) {
  const KvCacheOptions options{.num_kv_heads = kHeads, .head_dim = kDim};
  SpreadKvCache here(rank(), KvCache::contiguous(cpu_, options));
  SpreadKvCache there(rank(), KvCache::contiguous(device_, options));
  const std::string append = "SpreadKvCache::append";
  expect_refused(append, "k", [&] { here.append(cpu_, device_q_, q_); });
  expect_refused(append, "v", [&] { here.append(cpu_, q_, device_q_); });
  expect_refused(append, "cache", [&] { there.append(cpu_, q_, q_); });
  here.append(cpu_, q_, q_);
  there.append(device_, device_q_, device_q_);
  const std::string attend = "spread_attention";
  expect_refused(attend, "q", [&] { spread_attention(cpu_, here, device_q_, {}, out_); });
  expect_refused(attend, "out", [&] { spread_attention(cpu_, here, q_, {}, device_q_); });
  expect_refused(attend, "lse", [&] { spread_attention(cpu_, here, q_, {}, out_, device_lse_); });
  expect_refused(attend, "cache", [&] { spread_attention(cpu_, there, q_, {}, out_); });
  const std::string both = "append_and_attend";
  expect_refused(both, "q", [&] { append_and_attend(cpu_, here, device_q_, q_, q_, {}, out_); });
  expect_refused(both, "k", [&] { append_and_attend(cpu_, here, q_, device_q_, q_, {}, out_); });
  expect_refused(both, "v", [&] { append_and_attend(cpu_, here, q_, q_, device_q_, {}, out_); });
  expect_refused(both, "out", [&] { append_and_attend(cpu_, here, q_, q_, q_, {}, device_q_); });
  expect_refused(both, "lse",
                 [&] { append_and_attend(cpu_, here, q_, q_, q_, {}, out_, device_lse_); });
  expect_refused(both, "cache", [&] { append_and_attend(cpu_, there, q_, q_, q_, {}, out_); });
  const Tensor mask = device(DType::kBool, {1, 1, 1, 1});
  const Tensor bias = device(DType::kF32, {1, 1, 1, 1});
  const Tensor per_head = device(DType::kF32, {kHeads});
  const auto option_refused = [&](const char* argument, const AttentionOptions& with) {
    expect_refused(attend, argument, [&] { spread_attention(cpu_, here, q_, with, out_); });
    expect_refused(both, argument, [&] { append_and_attend(cpu_, here, q_, q_, q_, with, out_); });
  };
  option_refused("mask", {.mask = mask});
  option_refused("bias", {.bias = bias});
  option_refused("alibi_slopes", {.alibi_slopes = per_head});
  option_refused("sinks", {.sinks = per_head});
  EXPECT_EQ(here.length(), 3);
  EXPECT_EQ(there.length(), 3);
}

class RankLayers : public RankOperands {
 protected:
  const MultiHeadAttentionOptions heads_{.embed_dim = 8, .num_heads = 2, .causal = true};
  const LatentAttentionOptions latents_{
      .embed_dim = 8, .num_heads = 2, .kv_rank = 3, .nope_dim = 4, .rope_dim = 2, .causal = true};
  const Tensor mask_ = device(DType::kBool, {1, 1, 3, 3});
  const Tensor bias_ = device(DType::kF32, {1, 1, 3, 3});
};

TEST_F(RankLayers, TensorParallelLayers) {
  TensorParallelAttention multi_head(rank(), heads_);
  TensorParallelLatentAttention latent(rank(), latents_);
  for (TensorParallelLayer* layer : {static_cast<TensorParallelLayer*>(&multi_head),
                                     static_cast<TensorParallelLayer*>(&latent)}) {
    const std::string name(layer->type_name());
    const std::string forward = name + "::forward";
    expect_refused(forward, "query", [&] { layer->forward(cpu_, device_x_); });
    expect_refused(forward, "key", [&] { layer->forward(cpu_, {.query = x_, .key = device_x_}); });
    expect_refused(forward, "query", [&] { layer->forward_training(cpu_, {.query = device_x_}); });
    expect_refused(forward, "mask", [&] { layer->forward(cpu_, x_, {.mask = mask_}); });
    expect_refused(forward, "bias", [&] { layer->forward(cpu_, x_, {.bias = bias_}); });
    expect_refused(forward, "out", [&] { layer->forward(cpu_, x_, {}, device_x_); });
    expect_refused(forward, "out",
                   [&] { layer->forward_training(cpu_, {.query = x_}, {}, device_x_); });
    KvCache here = KvCache::contiguous(cpu_, layer->cache_options());
    KvCache there = KvCache::contiguous(device_, layer->cache_options());
    layer->eval();
    expect_refused(forward, "x", [&] { layer->forward(cpu_, device_x_, here); });
    expect_refused(forward, "cache", [&] { layer->forward(cpu_, x_, there); });
    Tensor out = device(DType::kF32, x_.shape());
    expect_refused(forward, "out", [&] { layer->forward(cpu_, x_, here, {}, out); });
    const auto cached_refused = [&](const char* argument, const CachedCall& call) {
      expect_refused(forward, argument, [&] { layer->forward(cpu_, x_, here, call); });
    };
    cached_refused("query", {.query = device_x_});
    cached_refused("mask", {.mask = mask_});
    cached_refused("bias", {.bias = bias_});
    const TrainingForward kept = layer->forward_training(cpu_, {.query = x_});
    expect_refused(name + "::backward", "grad_out",
                   [&] { layer->backward(cpu_, device_x_, kept.saved); });
    expect_refused(name + "::backward", "gradients.query",
                   [&] { layer->backward(cpu_, x_, kept.saved, {.query = device_x_}); });
    const Parameter& first = layer->named_parameters().front();
    const Tensor weight = device(DType::kF32, first.value.shape());
    expect_refused(name + "::set_parameter", first.name,
                   [&] { layer->set_whole_parameter(cpu_, first.name, weight); });
    AdamW adamw(cpu_, layer->parameters(), {});
    layer->to(device_);
    expect_refused(forward, "layer", [&] { layer->forward(cpu_, x_); });
    expect_refused(forward, "layer", [&] { layer->forward(cpu_, x_, here); });
    expect_refused(name + "::whole_parameter", "layer",
                   [&] { layer->whole_parameter(cpu_, first.name); });
    expect_refused("write_tensor_parallel_attention", "layer", [&] {
      write_tensor_parallel_attention(cpu_, "/nowhere/layer", *layer,
                                      layer == &multi_head ? "llama" : "deepseek_v3", 0);
    });
    expect_refused("save_training", "layer",
                   [&] { save_training(cpu_, "/nowhere/training", *layer, adamw); });
    expect_refused("load_training", "layer",
                   [&] { load_training(cpu_, "/nowhere/training", *layer, adamw); });
    expect_refused(
        "save_training", "optimiser",
        [&] { save_training(device_, "/nowhere/training", *layer, adamw); }, true);
    expect_refused(
        "load_training", "optimiser",
        [&] { load_training(device_, "/nowhere/training", *layer, adamw); }, true);
    EXPECT_NE(error_of([&] { layer->clip_gradients(cpu_, 1); }).find("cuda:77"), std::string::npos);
  }
}

TEST_F(RankLayers, ValuesOfMultiHeadAttention) {
  TensorParallelAttention layer(rank(), heads_);
  const LayerInputs inputs{.query = x_, .key = x_, .value = device_x_};
  const std::string forward = "TensorParallelAttention::forward";
  expect_refused(forward, "value", [&] { layer.forward(cpu_, inputs); });
  expect_refused(forward, "value", [&] { layer.forward_training(cpu_, inputs); });
  const SavedForward saved =
      layer.forward_training(cpu_, {.query = x_, .key = x_, .value = x_}).saved;
  const auto refused = [&](const char* argument, const InputGradientViews& gradients) {
    expect_refused("TensorParallelAttention::backward", argument,
                   [&] { layer.backward(cpu_, x_, saved, gradients); });
  };
  refused("gradients.key", {.key = device_x_});
  refused("gradients.value", {.value = device_x_});
}

TEST_F(RankLayers, WholeParameters) {
  const auto expect_both_refused = [&](TensorParallelLayer&& layer, AttentionLayer&& whole) {
    const std::string set = std::string(layer.type_name()) + "::set_parameter";
    const std::string& first = layer.named_parameters().front().name;
    whole.to(device_);
    expect_refused(set, first, [&] { layer.set_whole_parameters(cpu_, whole); });
    whole.to(cpu_);
    layer.to(device_);
    expect_refused(set, "layer", [&] { layer.set_whole_parameters(cpu_, whole); });
    EXPECT_NO_THROW(layer.set_whole_parameters(device_, whole));  // the host's are taken everywhere
  };
  expect_both_refused(TensorParallelAttention(rank(), heads_), MultiHeadAttention(heads_));
  expect_both_refused(TensorParallelLatentAttention(rank(), latents_), LatentAttention(latents_));
}

TEST_F(RankLayers, LatentsOverRanks) {
  TensorParallelLatentAttention spread(rank(), latents_);
  spread.eval();
  SpreadKvCache here(rank(), KvCache::contiguous(cpu_, spread.cache_options()));
  SpreadKvCache there(rank(), KvCache::contiguous(device_, spread.cache_options()));
  const std::string forward = "TensorParallelLatentAttention::forward";
  expect_refused(forward, "x", [&] { spread.forward(cpu_, device_x_, here); });
  expect_refused(forward, "cache", [&] { spread.forward(cpu_, x_, there); });
  expect_refused(forward, "out", [&] { spread.forward(cpu_, x_, here, {}, device_x_); });
  const auto cached_refused = [&](const char* argument, const CachedCall& call) {
    expect_refused(forward, argument, [&] { spread.forward(cpu_, x_, here, call); });
  };
  cached_refused("query", {.query = device_x_});
  cached_refused("mask", {.mask = mask_});
  cached_refused("bias", {.bias = bias_});
  EXPECT_EQ(here.length(), 0);
}

TEST_F(RankLayers, ContextParallelLatents) {
  LatentAttention layer(latents_);
  const ContextPlan plan = plan_context(1, 3, 3);
  const std::string over = "context_parallel_forward";
  const auto refused = [&](const char* argument, const LayerInputs& inputs,
                           const LayerCall& call = {}) {
    expect_refused(over, argument,
                   [&] { context_parallel_forward(cpu_, rank(), layer, inputs, plan, call); });
    expect_refused(over, argument, [&] {
      context_parallel_forward_training(cpu_, rank(), layer, inputs, plan, call);
    });
  };
  refused("query", {.query = device_x_});
  refused("key", {.query = x_, .key = device_x_});
  refused("mask", {.query = x_}, {.mask = mask_});
  refused("bias", {.query = x_}, {.bias = bias_});
  expect_refused(over, "out", [&] {
    context_parallel_forward(cpu_, rank(), layer, {.query = x_}, plan, {}, device_x_);
  });
  expect_refused(over, "out", [&] {
    context_parallel_forward_training(cpu_, rank(), layer, {.query = x_}, plan, {}, device_x_);
  });
  const std::string backward = "context_parallel_backward";
  const TrainingForward kept =
      context_parallel_forward_training(cpu_, rank(), layer, {.query = x_, .key = x_}, plan);
  expect_refused(backward, "grad_out",
                 [&] { context_parallel_backward(cpu_, rank(), layer, device_x_, kept.saved); });
  const auto gradient_refused = [&](const char* argument, const InputGradientViews& gradients) {
    expect_refused(backward, argument, [&] {
      context_parallel_backward(cpu_, rank(), layer, x_, kept.saved, gradients);
    });
  };
  gradient_refused("gradients.query", {.query = device_x_});
  gradient_refused("gradients.key", {.key = device_x_});
  layer.to(device_);
  expect_refused(over, "layer",
                 [&] { context_parallel_forward(cpu_, rank(), layer, {.query = x_}, plan); });
}

}  // namespace
}  // namespace ladon::test
