// Bad input to LatentAttention: each is refused with a message that names the argument, what came
// and what was expected; the layer is as it was.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

LatentAttentionOptions good_options() {
  return {.embed_dim = 20,
          .num_heads = 3,
          .query_rank = 7,
          .kv_rank = 9,
          .nope_dim = 6,
          .rope_dim = 4,
          .value_dim = 5,
          .causal = true};
}

std::string message_of(const std::function<void(LatentAttentionOptions&)>& change) {
  LatentAttentionOptions options = good_options();
  change(options);
  const std::string by_validate = error_of([&] { options.validate(); });
  EXPECT_EQ(error_of([&] { LatentAttention{options}; }), by_validate);
  return by_validate;
}

TEST(LatentErrors, Options) {
  using O = LatentAttentionOptions;
  good_options().validate();
  EXPECT_EQ(message_of([](O& o) { o.embed_dim = 0; }),
            "LatentAttention: embed_dim: got 0, expected 1 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.num_heads = 0; }),
            "LatentAttention: num_heads: got 0, expected 1 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.kv_rank = 0; }),
            "LatentAttention: kv_rank: got 0, expected 1 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.nope_dim = o.rope_dim = 0; }),
            "LatentAttention: nope_dim: got 0, expected 1 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.query_rank = -1; }),
            "LatentAttention: query_rank: got -1, expected 0 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.value_dim = -1; }),
            "LatentAttention: value_dim: got -1, expected 0 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.rope_dim = -2; }),
            "LatentAttention: rope_dim: got -2, expected 0 to 1048576");
  EXPECT_EQ(message_of([](O& o) { o.rope_dim = 3; }),
            "LatentAttention: rope_dim: got 3, expected an even number, or 0 for no rope");
  EXPECT_EQ(
      message_of([](O& o) { o.kv_rank = 33; }),
      "LatentAttention: kv_rank: got 33, expected a latent smaller than the 33 elements of the "
      "keys and values that it stands for");
  EXPECT_EQ(message_of([](O& o) { o.norm_epsilon = 0; }),
            "LatentAttention: norm_epsilon: got 0, expected a positive number");
  EXPECT_EQ(message_of([](O& o) { o.rope.rotary_dim = 4; }),
            "LatentAttention: rope.rotary_dim: got 4, expected 0 because rope_dim says it");
  EXPECT_EQ(message_of([](O& o) { o.scale = std::numeric_limits<double>::infinity(); }),
            "LatentAttention: scale: got inf, expected a finite number");
  EXPECT_EQ(message_of([](O& o) { o.dropout = 1; }),
            "LatentAttention: dropout: got 1, expected a number in [0, 1)");
  EXPECT_EQ(message_of([](O& o) { o.dtype = DType::kI32; }),
            "LatentAttention: dtype: got i32, expected f64, f32, f16 or bf16");
  EXPECT_EQ(message_of([](O& o) { o.form = static_cast<LatentForm>(9); }),
            "LatentAttention: form: got 9, expected a LatentForm");
  EXPECT_NE(message_of([](O& o) { o.rope.base = -1; }).find("base"), std::string::npos);
  EXPECT_EQ(message_of([](O& o) { o.rope.frequencies = {1}; }),
            "LatentAttention: rope.frequencies: got 1 of them, expected 2, one for each pair of "
            "rotary_dim 4");
  EXPECT_EQ(message_of([](O& o) {
              o.rope_dim = 0;
              o.rope.frequencies = {1};
            }),
            "LatentAttention: rope.frequencies: got 1 of them, expected none because rope_dim is "
            "0");
  // What may be left out.
  LatentAttentionOptions bare = good_options();
  bare.query_rank = bare.rope_dim = bare.value_dim = 0;
  const LatentAttention layer(bare);
  EXPECT_EQ(layer.value_dim(), 6);
  EXPECT_EQ(layer.head_dim(), 6);
  EXPECT_EQ(layer.latent_dim(), 9);
}

TEST(LatentErrors, ParametersAndNames) {
  LatentAttentionOptions options = good_options();
  options.query_bias = options.kv_bias = options.out_bias = true;
  const LatentAttention layer(options);
  std::vector<std::string> names;
  for (const Parameter& parameter : layer.named_parameters()) names.push_back(parameter.name);
  EXPECT_EQ(names,
            (std::vector<std::string>{"q_a_proj.weight", "q_a_proj.bias", "q_a_layernorm.weight",
                                      "q_b_proj.weight", "kv_a_proj_with_mqa.weight",
                                      "kv_a_proj_with_mqa.bias", "kv_a_layernorm.weight",
                                      "kv_b_proj.weight", "o_proj.weight", "o_proj.bias"}));
  EXPECT_EQ(layer.parameter("q_b_proj.weight").value.shape(), (Dims{30, 7}));
  EXPECT_EQ(layer.parameter("kv_a_proj_with_mqa.weight").value.shape(), (Dims{13, 20}));
  EXPECT_EQ(layer.parameter("kv_b_proj.weight").value.shape(), (Dims{33, 9}));
  EXPECT_EQ(layer.parameter("o_proj.weight").value.shape(), (Dims{20, 15}));
  EXPECT_EQ(layer.parameter_count(),
            7 * 20 + 7 + 7 + 30 * 7 + 13 * 20 + 13 + 9 + 33 * 9 + 20 * 15 + 20);
  const AttentionLayer& interface = layer;
  EXPECT_EQ(interface.type_name(), "LatentAttention");
  EXPECT_EQ(interface.embed_dim(), 20);
  EXPECT_EQ(interface.num_heads(), 3);
  EXPECT_EQ(interface.head_dim(), 10);
  EXPECT_EQ(interface.value_dim(), 5);
  EXPECT_EQ(dynamic_cast<const LatentAttention&>(interface).query_rank(), 7);
}

TEST(LatentErrors, ASeedGivesItsWeightsAndNoOthers) {
  const LatentAttention layer(good_options(), 5);
  const LatentAttention same(good_options(), 5);
  const LatentAttention other(good_options(), 6);
  for (const Parameter& parameter : layer.named_parameters()) {
    const std::vector<double> weights = elements_of(parameter.value);
    EXPECT_EQ(weights, elements_of(same.parameter(parameter.name).value)) << parameter.name;
    if (parameter.value.rank() == 1) continue;  // norms start at 1
    EXPECT_NE(weights, elements_of(other.parameter(parameter.name).value)) << parameter.name;
  }
}

TEST(LatentErrors, Calls) {
  const Context context;
  LatentAttention layer(good_options());
  const Tensor x = random_tensor(DType::kF32, {2, 3, 20}, 1);
  const auto message = [&](const LayerInputs& inputs,
                           ErrorCode code = ErrorCode::kInvalidArgument) {
    const std::string first = error_of([&] { layer.forward(context, inputs); }, code);
    EXPECT_EQ(error_of([&] { layer.forward_training(context, inputs); }, code), first);
    return first;
  };
  const Tensor narrow(DType::kF32, {2, 3, 19});
  const Tensor flat(DType::kF32, {20});
  const Tensor doubles(DType::kF64, {2, 3, 20});
  EXPECT_EQ(message({.query = narrow}),
            "LatentAttention::forward: query: got [2, 3, 19], expected a width of 20");
  EXPECT_EQ(message({.query = flat}),
            "LatentAttention::forward: query: got [20], expected [batch, seq, 20] or [seq, 20]");
  EXPECT_NE(message({.query = doubles}).find("f64"), std::string::npos);
  EXPECT_EQ(message({.query = x, .key = x, .value = x}, ErrorCode::kUnsupported),
            "LatentAttention::forward: value: got [2, 3, 20], expected none: values come from the "
            "latents of key");
  const Tensor alone(DType::kF32, {3, 20});
  EXPECT_EQ(
      message({.query = x, .key = alone}),
      "LatentAttention::forward: key: got [3, 20], expected a batch as in query's [2, 3, 20]");
  EXPECT_EQ(message({.query = x, .key = narrow}),
            "LatentAttention::forward: key: got [2, 3, 19], expected a width of 20");
  EXPECT_EQ(error_of([&] { layer.compress(context, narrow); }),
            "LatentAttention::compress: x: got [2, 3, 19], expected a width of 20");
  EXPECT_EQ(error_of([&] { layer.expand_keys(context, x); }),
            "LatentAttention::expand_keys: latents: got [2, 3, 20], expected a width of 13");
  EXPECT_EQ(error_of([&] { layer.expand_values(context, x); }),
            "LatentAttention::expand_values: latents: got [2, 3, 20], expected a width of 13");
}

TEST(LatentErrors, Backward) {
  const Context context;
  LatentAttention layer(good_options());
  LatentAttention other(good_options());
  const Tensor x = random_tensor(DType::kF32, {2, 3, 20}, 1);
  const TrainingForward forward = layer.forward_training(context, {.query = x});
  EXPECT_EQ(error_of([&] { other.backward(context, x, forward.saved); }),
            "LatentAttention::backward: saved: got what another layer saved, expected what this "
            "layer's forward_training() saved");
  EXPECT_EQ(
      error_of([&] { layer.backward(context, x, SavedForward()); }),
      "LatentAttention::backward: saved: got nothing, expected what forward_training() saved");
  const Tensor shorter(DType::kF32, {2, 2, 20});
  EXPECT_NE(error_of([&] {
              layer.backward(context, shorter, forward.saved);
            }).find("LatentAttention::backward: grad_out: got [2, 2, 20]"),
            std::string::npos);
  for (const Parameter& parameter : layer.named_parameters()) {
    EXPECT_TRUE(parameter.gradient.view().absent()) << parameter.name;
  }
}

TEST(LatentErrors, Caches) {
  const Context context;
  LatentAttentionOptions options = good_options();
  options.dropout = 0.1;
  LatentAttention layer(options);
  layer.eval();
  const Tensor x = random_tensor(DType::kF32, {2, 3, 20}, 1);
  const auto refused = [&](KvCache cache) {
    const CacheState before = state_of(cache);
    const std::string message = error_of([&] { layer.forward(context, x, cache); });
    EXPECT_EQ(state_of(cache), before);
    return message;
  };
  EXPECT_EQ(
      refused(KvCache::contiguous(host_context(), {.batch = 2, .num_kv_heads = 3, .head_dim = 10})),
      "LatentAttention::forward: cache: got one of 3 KV heads of 10 and 10, expected the "
      "layer's 1 KV heads of 13 and 9 within them");
  EXPECT_EQ(refused(KvCache::window(host_context(), layer.cache_options(2), 4)),
            "LatentAttention::forward: cache: got a window of 4, expected one that keeps every "
            "token, because the layer has no window");
  layer.train();
  EXPECT_EQ(refused(KvCache::contiguous(host_context(), layer.cache_options(2))),
            "LatentAttention::forward: cache: got one while the layer trains with dropout, "
            "expected eval() first");
  KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(1));
  const Tensor latents(DType::kF32, {1, 2, 1, 13});
  EXPECT_EQ(error_of([&] { cache.append(host_context(), latents, latents); }),
            "KvCache::append: v: got [1, 2, 1, 13], expected none because the values are in the "
            "keys");
  EXPECT_EQ(error_of([] {
              KvCache::contiguous(
                  host_context(),
                  {.num_kv_heads = 1, .head_dim = 4, .value_dim = 5, .values_in_keys = true});
            }),
            "KvCache::contiguous: value_dim: got 5, expected at most head_dim = 4 because the "
            "values are in the keys");
}

TEST(LatentErrors, MasksOfCachedCalls) {
  const Context context;
  const LatentAttention layer(good_options());
  const Tensor x = random_tensor(DType::kF32, {2, 3, 20}, 1);
  for (const Dims& shape : {Dims{2, 1, 4, 9}, Dims{5, 1, 3, 3}, Dims{2, 77, 3, 3}}) {
    KvCache cache = KvCache::contiguous(host_context(), layer.cache_options(2));
    const Tensor mask(DType::kBool, shape);
    EXPECT_EQ(error_of([&] { layer.forward(context, x, cache, {.mask = mask}); }),
              "LatentAttention::forward: mask: got " + shape.to_string() +
                  ", expected [2, 3, 3, 3] or 1 in any place");
    EXPECT_EQ(cache.length(0), 0);
  }
  // Without rope nothing of its scaling is read.
  LatentAttentionOptions bare = good_options();
  bare.rope_dim = 0;
  bare.rope.scaling = {.kind = RopeScaling::kYarn,
                       .factor = std::numeric_limits<double>::quiet_NaN(),
                       .mscale_all_dim = 1};
  EXPECT_EQ(LatentAttention(bare).options().scale, 1 / std::sqrt(6.0));
}

}  // namespace
}  // namespace ladon::test
