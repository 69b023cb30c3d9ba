// Memory with a place: tensors on a device, and public functions and objects that are given
// something elsewhere than their Context. Every operand one by one: device_operands_test.cpp.
#include "ladon/device.h"

#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "ladon/ladon.h"
#include "support/contexts.h"
#include "support/device_fixture.h"

namespace ladon::test {
namespace {

TEST_F(DeviceTest, TensorsKnowWhereTheyAre) {
  EXPECT_EQ(q_.device(), DeviceId());
  EXPECT_EQ(device_q_.device(), kPretendedDevice);
  EXPECT_EQ(device_q_.device().to_string(), "cuda:77");
  EXPECT_EQ(DeviceId().to_string(), "cpu");
  const ConstTensorView view = device_q_;
  EXPECT_EQ(view.device(), kPretendedDevice);
  EXPECT_EQ(view.slice(1, 0, 2).device(), kPretendedDevice);
  EXPECT_EQ(view.select(2, 1).device(), kPretendedDevice);
  EXPECT_EQ(view.transpose(1, 2).device(), kPretendedDevice);
  EXPECT_EQ(view.reshape({3, 8}).device(), kPretendedDevice);
  EXPECT_EQ(split_heads(view.reshape({1, 3, 8}), 2).device(), kPretendedDevice);
  EXPECT_EQ(Tensor().device(), DeviceId());
  const Tensor moved = std::move(device_q_);
  EXPECT_EQ(moved.device(), kPretendedDevice);
}

TEST_F(DeviceTest, TheHostDoesNotReadADevicesMemory) {
  EXPECT_EQ(error_of([&] { device_q_.data_as<float>(); }),
            "data_as: view: got memory of cuda:77, which the host cannot read, expected a copy of "
            "it: Tensor::to() makes one");
  EXPECT_DEATH(
      {
        volatile float first = *static_cast<const float*>(device_q_.data());
        static_cast<void>(first);
      },
      "");
}

TEST_F(DeviceTest, CopiesGoEveryWay) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF64}) {
    Tensor x = host(DType::kF32, {3, 4, 5});
    fill_normal(cpu_, x, 0, 1, 5);
    const Tensor expected = Tensor::copy_of(cpu_, x.view().transpose(0, 2), dtype);
    // To the device and back, converting and with gaps on the way.
    Tensor wide = device(dtype, {5, 4, 6});
    copy(device_, x.view().transpose(0, 2), wide.view().slice(2, 1, 4));
    Tensor back = host(dtype, {5, 4, 3});
    copy(device_, wide.view().slice(2, 1, 4), back);
    EXPECT_EQ(elements_of(back), elements_of(expected)) << name_of(dtype);
    EXPECT_EQ(elements_of(x.to(device_).to_host()), elements_of(x));
    EXPECT_EQ(elements_of(x.to(device_).to(cpu_)), elements_of(x));
    EXPECT_EQ(elements_of(x.to(device_).clone()), elements_of(x));
    EXPECT_EQ(Tensor::copy_of(device_, x).device(), DeviceId());
  }
}

TEST_F(DeviceTest, MemoryOutlivesItsContextAndIsGivenBack) {
  const std::size_t before = pretended_bytes_in_use();
  {
    Tensor kept;
    {
      const Context context = pretended_context();
      kept = Tensor(context, DType::kF32, {1000});
    }
    EXPECT_GE(pretended_bytes_in_use(), before + 4000);
    EXPECT_EQ(elements_of(kept), std::vector<double>(1000));
  }
  EXPECT_EQ(pretended_bytes_in_use(), before);
}

TEST_F(DeviceTest, ADeviceThatIsNotThere) {
  EXPECT_EQ(error_of([] { Context(ContextOptions{.device_index = 1}); }),
            "Context: device_index: got 1, expected 0: there is one CPU");
  EXPECT_EQ(error_of([] { Context(ContextOptions{.device = static_cast<Device>(9)}); }),
            "Context: device: got Device(9), expected a Device");
}

TEST_F(DeviceTest, AttentionRefusesOperandsElsewhere) {
  expect_refused("attention", "q", [&] { attention(cpu_, device_q_, q_, q_, {}, out_); });
  expect_refused("attention", "k", [&] { attention(cpu_, q_, device_q_, q_, {}, out_); });
  expect_refused("attention", "v", [&] { attention(cpu_, q_, q_, device_q_, {}, out_); });
  expect_refused("attention", "out", [&] { attention(cpu_, q_, q_, q_, {}, device_q_); });
  expect_refused("attention", "lse", [&] { attention(cpu_, q_, q_, q_, {}, out_, device_lse_); });
  expect_refused("attention", "q", [&] { attention(cpu_, device_q_, q_, q_); });
  expect_refused(
      "attention", "q", [&] { attention(device_, q_, q_, q_, {}, out_); }, true);
  const Tensor mask = device(DType::kBool, {1, 1, 3, 3});
  const Tensor bias = device(DType::kF32, {1, 1, 3, 3});
  const Tensor per_head = device(DType::kF32, {kHeads});
  const auto refused = [&](const char* argument, const AttentionOptions& options) {
    expect_refused("attention", argument, [&] { attention(cpu_, q_, q_, q_, options, out_); });
  };
  refused("mask", {.mask = mask});
  refused("bias", {.bias = bias});
  refused("alibi_slopes", {.alibi_slopes = per_head});
  refused("sinks", {.sinks = per_head});
}

TEST_F(DeviceTest, BackwardWeightsAndMergeRefuseOperandsElsewhere) {
  const AttentionSaved saved{.out = out_, .lse = lse_, .dout = q_};
  Tensor dq = host(DType::kF32, q_.shape());
  expect_refused("attention_backward", "dq",
                 [&] { attention_backward(cpu_, q_, q_, q_, {}, saved, {.dq = device_q_}); });
  expect_refused("attention_backward", "out", [&] {
    attention_backward(cpu_, q_, q_, q_, {}, {.out = device_q_, .lse = lse_, .dout = q_},
                       {.dq = dq});
  });
  expect_refused("attention_backward", "lse", [&] {
    attention_backward(cpu_, q_, q_, q_, {}, {.out = out_, .lse = device_lse_, .dout = q_},
                       {.dq = dq});
  });
  Tensor weights = device(DType::kF32, {1, kHeads, 3, 3});
  expect_refused("attention_weights", "weights",
                 [&] { attention_weights(cpu_, q_, q_, {}, weights); });
  const ConstTensorView outs[] = {q_, device_q_};
  const ConstTensorView lses[] = {lse_, lse_};
  expect_refused("merge_attention", "outs[1]", [&] { merge_attention(cpu_, outs, lses, out_); });
}

TEST_F(DeviceTest, RopeAndHelpersRefuseOperandsElsewhere) {
  expect_refused("rope", "x", [&] { rope(cpu_, device_q_, {}, {}, out_); });
  expect_refused("rope", "out", [&] { rope(cpu_, q_, {}, {}, device_q_); });
  expect_refused("rope_backward", "dx", [&] { rope_backward(cpu_, q_, {}, {}, device_q_); });
  Tensor table = device(DType::kF32, {5, 2});
  Tensor other = host(DType::kF32, {5, 2});
  expect_refused("rope", "table.cos", [&] {
    rope(cpu_, q_, {}, RopeTable{table, other}, {}, out_);
  });
  expect_refused("make_rope_table", "sin", [&] { make_rope_table(cpu_, {}, 4, other, table); });
  expect_refused("repeat_kv", "x", [&] { repeat_kv(cpu_, device_q_, 2); });
  expect_refused("merge_heads", "x", [&] { merge_heads(cpu_, device_q_); });
  expect_refused("fill_uniform", "view", [&] { fill_uniform(cpu_, device_q_, 0, 1, 1); });
  expect_refused("fill_normal", "view", [&] { fill_normal(cpu_, device_q_, 0, 1, 1); });
  expect_refused("copy", "from", [&] { copy(cpu_, device_q_, out_); });
  expect_refused("copy", "to", [&] { copy(cpu_, q_, device_q_); });
  expect_refused("Tensor::copy_of", "view", [&] { Tensor::copy_of(cpu_, device_q_); });
  expect_refused("write_npy", "view", [&] { write_npy("/nowhere/x.npy", device_q_); });
  expect_refused("write_safetensors", "tensor \"a\"", [&] {
    write_safetensors("/nowhere/x", std::vector<SafetensorsItem>{{"a", device_q_}});
  });
}

TEST_F(DeviceTest, CachesRefuseContextsAndRowsElsewhere) {
  const KvCacheOptions options{.num_kv_heads = kHeads, .head_dim = kDim};
  KvCache host_cache = KvCache::contiguous(cpu_, options);
  const auto pool = std::make_shared<PagePool>(device_, options, 4, 4);
  EXPECT_EQ(pool->device(), kPretendedDevice);
  std::vector<KvCache> caches;
  caches.push_back(KvCache::contiguous(device_, options));
  caches.push_back(KvCache::window(device_, options, 5));
  caches.push_back(KvCache::paged(pool));
  expect_refused("KvCache::append", "k", [&] { host_cache.append(cpu_, device_q_, q_); });
  expect_refused("KvCache::append", "v", [&] { host_cache.append(cpu_, q_, device_q_); });
  for (KvCache& cache : caches) {
    EXPECT_EQ(cache.device(), kPretendedDevice);
    EXPECT_EQ(cache.view().device, kPretendedDevice);
    expect_refused("KvCache::append", "cache", [&] { cache.append(cpu_, q_, q_); });
    expect_refused("KvCache::append", "cache", [&] { KvAppend(cpu_, cache, q_, q_); });
    expect_refused("KvCache::fork", "cache", [&] { cache.fork(cpu_); });
    expect_refused("KvCache::reorder", "cache",
                   [&] { cache.reorder(cpu_, std::vector<std::int64_t>{0}); });
    expect_refused("KvCache::reserve", "cache", [&] { cache.reserve(cpu_, 9); });
    expect_refused("KvCache::save", "cache", [&] { cache.save(cpu_, "/nowhere/cache"); });
    expect_refused("KvCache::load", "cache", [&] { cache.load(cpu_, "/nowhere/cache"); });
    expect_refused("attention", "cache.k", [&] { attention(cpu_, q_, cache.view(), {}, out_); });
  }
}

class DeviceLayers : public DeviceTest {
 protected:
  MultiHeadAttention multi_head_{{.embed_dim = 8, .num_heads = 2, .causal = true, .sinks = true}};
  LatentAttention latent_{
      {.embed_dim = 8, .num_heads = 2, .kv_rank = 3, .nope_dim = 4, .rope_dim = 2, .causal = true}};
};

TEST_F(DeviceLayers, LayersRefuseWhatIsElsewhere) {
  for (AttentionLayer* layer :
       {static_cast<AttentionLayer*>(&multi_head_), static_cast<AttentionLayer*>(&latent_)}) {
    const std::string name(layer->type_name());
    const std::string forward = name + "::forward";
    expect_refused(forward, "query", [&] { layer->forward(cpu_, device_x_); });
    expect_refused(
        forward, "layer", [&] { layer->forward(device_, device_x_); }, true);
    const Tensor mask = device(DType::kBool, {1, 1, 3, 3});
    Tensor weights = device(DType::kF32, {1, 2, 3, 3});
    expect_refused(forward, "mask", [&] { layer->forward(cpu_, x_, {.mask = mask}); });
    expect_refused(forward, "weights", [&] { layer->forward(cpu_, x_, {.weights = weights}); });
    KvCache cache = KvCache::contiguous(cpu_, layer->cache_options());
    KvCache elsewhere = KvCache::contiguous(device_, layer->cache_options());
    layer->eval();
    expect_refused(forward, "x", [&] { layer->forward(cpu_, device_x_, cache); });
    expect_refused(forward, "cache", [&] { layer->forward(cpu_, x_, elsewhere); });
    Tensor out = device(DType::kF32, x_.shape());
    expect_refused(forward, "out", [&] { layer->forward(cpu_, x_, cache, {}, out); });
    expect_refused("KvCache::fork", "cache", [&] { layer->forward_from(cpu_, x_, elsewhere); });
    const TrainingForward kept = layer->forward_training(cpu_, {.query = x_});
    expect_refused(name + "::backward", "grad_out",
                   [&] { layer->backward(cpu_, device_x_, kept.saved); });
    expect_refused(forward, "out", [&] { layer->forward(cpu_, x_, {}, out); });
    expect_refused(name + "::backward", "gradients.query",
                   [&] { layer->backward(cpu_, x_, kept.saved, {.query = out}); });
    const Tensor weight = device(DType::kF32, layer->named_parameters()[0].value.shape());
    const std::string weight_name = layer->named_parameters()[0].name;
    expect_refused(name + "::set_parameter", weight_name,
                   [&] { layer->set_parameter(cpu_, weight_name, weight); });
    expect_refused(
        name + "::set_parameter", "layer",
        [&] { layer->set_parameter(device_, weight_name, weight); }, true);
    expect_refused(
        "AttentionLayer::zero_grad", "layer", [&] { layer->zero_grad(device_); }, true);
    // A saved call of a layer that has moved since.
    layer->to(device_);
    EXPECT_EQ(layer->device(), kPretendedDevice);
    expect_refused(
        name + "::backward", "saved", [&] { layer->backward(device_, device_x_, kept.saved); },
        true);
    expect_refused(forward, "layer", [&] { layer->forward(cpu_, x_); });
  }
  expect_refused("LatentAttention::compress", "layer", [&] { latent_.compress(cpu_, x_); });
  expect_refused("LatentAttention::expand_keys", "layer", [&] { latent_.expand_keys(cpu_, x_); });
  expect_refused("LatentAttention::expand_values", "layer",
                 [&] { latent_.expand_values(cpu_, x_); });
}

TEST_F(DeviceLayers, OptimisersRefuseWhatIsElsewhere) {
  Parameter weight = Parameter::zeros("w", DType::kBF16, {3});
  Parameter moved = weight.to(device_);
  EXPECT_EQ(moved.value.device(), kPretendedDevice);
  EXPECT_EQ(moved.gradient.device(), kPretendedDevice);
  const std::string value = "parameters[0].value (w)";
  expect_refused("Sgd", value, [&] { Sgd(cpu_, {&moved}, {}); });
  expect_refused("AdamW", value, [&] { AdamW(cpu_, {&moved}, {}); });
  Sgd sgd(device_, {&moved}, {});
  AdamW adamw(device_, {&moved}, {});
  expect_refused("Sgd::step", value, [&] { sgd.step(cpu_); });
  expect_refused("AdamW::step", value, [&] { adamw.step(cpu_); });
  Parameter* const pointers[] = {&moved};
  expect_refused("clip_gradients", value, [&] { clip_gradients(cpu_, pointers, 1); });
  expect_refused("Parameter::zero_gradient", "gradient", [&] { moved.zero_gradient(cpu_); });
  moved.gradient = {};
  expect_refused("Parameter::make_gradient", "value", [&] { moved.make_gradient(cpu_); });
}

TEST_F(DeviceLayers, ALayerMovesThereAndBackAndGivesTheSameBits) {
  fill_normal(cpu_, x_, 0, 1, 3);
  const Tensor there = x_.to(device_);
  const Tensor before = multi_head_.forward(cpu_, x_);
  MultiHeadAttention copy = multi_head_;
  copy.to(device_);
  EXPECT_EQ(elements_of(copy.forward(device_, there)), elements_of(before));
  const MultiHeadAttention clone = copy;  // on the device too
  EXPECT_EQ(elements_of(clone.forward(device_, there)), elements_of(before));
  copy.to(cpu_);
  EXPECT_EQ(elements_of(copy.forward(cpu_, x_)), elements_of(before));
}

}  // namespace
}  // namespace ladon::test
