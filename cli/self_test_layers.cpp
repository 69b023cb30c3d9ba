// Layers on small random problems: whole sequences, cached chunks and tokens, gradients.
#include <memory>
#include <string>
#include <vector>

#include "compare_tensors.h"
#include "ladon/alibi.h"
#include "ladon/kv_cache.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "ladon/random.h"
#include "self_test.h"

namespace ladon::cli {
namespace {

constexpr std::int64_t kEmbedDim = 96;
constexpr std::int64_t kLength = 37;

struct NamedLayer {
  std::string name;
  std::unique_ptr<AttentionLayer> layer;
  std::unique_ptr<AttentionLayer> truth;  // the same weights in double
};

template <class Layer, class Options>
NamedLayer make_layer(const Context& context, std::string name, Options options, DType dtype,
                      std::uint64_t seed) {
  options.dtype = dtype;
  const Context host(ContextOptions{.num_threads = 1});
  auto layer = std::make_unique<Layer>(options, seed);
  options.dtype = DType::kF64;
  auto truth = std::make_unique<Layer>(options, seed);
  for (Parameter& parameter : layer->named_parameters()) {
    // Biases, norms and sinks would be all 0 or 1 otherwise.
    if (parameter.value.rank() == 1) {
      const double middle = parameter.name.find("norm") == std::string::npos ? 0 : 1;
      fill_normal(host, parameter.value, middle, 0.2, seed, 30);
    }
    truth->set_parameter(host, parameter.name, parameter.value);
  }
  layer->to(context);
  return {std::move(name), std::move(layer), std::move(truth)};
}

std::vector<NamedLayer> make_layers(const Context& context, DType dtype, std::uint64_t seed) {
  const MultiHeadAttentionOptions base{.embed_dim = kEmbedDim,
                                       .num_heads = 6,
                                       .num_kv_heads = 6,
                                       .head_dim = 20,
                                       .causal = true,
                                       .rope = RopeOptions{}};
  MultiHeadAttentionOptions gqa = base;
  gqa.num_kv_heads = 2;
  gqa.qk_norm = true;
  gqa.window_left = 11;
  gqa.sinks = true;
  MultiHeadAttentionOptions mqa = base;
  mqa.num_kv_heads = 1;
  mqa.rope.reset();
  mqa.alibi_slopes = alibi_slopes(6);
  // No key bias: without rope it moves all scores of a row alike, and its gradient is exactly 0.
  mqa.query_bias = mqa.value_bias = mqa.out_bias = true;
  LatentAttentionOptions mla{.embed_dim = kEmbedDim,
                             .num_heads = 6,
                             .query_rank = 30,
                             .kv_rank = 24,
                             .nope_dim = 16,
                             .rope_dim = 8,
                             .causal = true,
                             .form = LatentForm::kExpanded};
  std::vector<NamedLayer> layers;
  layers.push_back(make_layer<MultiHeadAttention>(context, "MHA", base, dtype, seed));
  layers.push_back(make_layer<MultiHeadAttention>(context, "GQA", gqa, dtype, seed));
  layers.push_back(make_layer<MultiHeadAttention>(context, "MQA", mqa, dtype, seed));
  layers.push_back(make_layer<LatentAttention>(context, "MLA expanded", mla, dtype, seed));
  mla.form = LatentForm::kAbsorbed;
  layers.push_back(make_layer<LatentAttention>(context, "MLA absorbed", mla, dtype, seed));
  return layers;
}

/// A prompt in two chunks, then token by token.
Tensor run_cached(const Context& context, const AttentionLayer& layer, const Tensor& x) {
  KvCache cache = KvCache::contiguous(context, layer.cache_options(x.size(0)));
  Tensor out(context, x.dtype(), x.shape());
  std::int64_t begin = 0;
  for (const std::int64_t end : {13L, 30L, 31L, 32L, 33L, 34L, 35L, 36L, 37L}) {
    const Tensor part = Tensor::copy_of(context, x.view().slice(1, begin, end));
    const Tensor result = layer.forward(context, part, cache);
    copy(context, result, out.view().slice(1, begin, end));
    begin = end;
  }
  return out;
}

}  // namespace

void SelfTest::layers() {
  // How often 16-bit floats are rounded between input and result: projections, norms, rope,
  // attention, output; and nearly as often again on the way back.
  constexpr int kForwardRoundings = 3;
  constexpr int kBackwardRoundings = 5;
  for (const DType dtype : kFloatTypes) {
    for (NamedLayer& one : make_layers(context_, dtype, seed_)) {
      Tensor x(context_, dtype, {2, kLength, kEmbedDim});
      Tensor dout(context_, dtype, x.shape());
      fill_normal(context_, x, 0, 1, seed_, 40);
      fill_normal(context_, dout, 0, 1, seed_, 41);
      const Tensor x_truth = Tensor::copy_of(context_, x, DType::kF64).to_host();
      const Tensor dout_truth = Tensor::copy_of(context_, dout, DType::kF64).to_host();

      const TrainingForward truth = one.truth->forward_training(reference_, {.query = x_truth});
      const Tensor whole = one.layer->forward(context_, x);
      compare(one.name + ": out", whole, truth.out, dtype, kForwardRoundings);
      const Tensor cached = run_cached(context_, *one.layer, x);
      compare(one.name + ": cached", cached, truth.out, dtype, kForwardRoundings);

      const TrainingForward saved = one.layer->forward_training(context_, {.query = x});
      const InputGradients got = one.layer->backward(context_, dout, saved.saved);
      const InputGradients wanted = one.truth->backward(reference_, dout_truth, truth.saved);
      compare(one.name + ": dx", got.query, wanted.query, dtype, kBackwardRoundings);
      // Once more, to be added to what is there.
      one.layer->backward(context_, dout, saved.saved);
      one.truth->backward(reference_, dout_truth, truth.saved);
      for (const Parameter& parameter : one.layer->named_parameters()) {
        compare(one.name + ": d" + parameter.name, parameter.gradient,
                one.truth->parameter(parameter.name).gradient, dtype, kBackwardRoundings);
      }
    }
  }
}

void SelfTest::optimisers() {
  constexpr int kSteps = 3;
  for (const DType dtype : kFloatTypes) {
    const auto run = [&](const Context& context, DType weights) {
      // Filled on the host, so that both have the same numbers.
      Parameter made = Parameter::zeros("w", weights, {13, 37});
      fill_normal(reference_, made.value, 0, 1, seed_, 50);
      fill_normal(reference_, made.gradient, 0, 0.3, seed_, 51);
      Parameter parameter = made.to(context);
      // The weights that a 16-bit layer starts from.
      if (weights != dtype) {
        const Tensor start = Tensor::copy_of(context, parameter.value, dtype);
        copy(context, start, parameter.value);
      }
      Sgd sgd(context, {&parameter}, {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1});
      AdamW adamw(context, {&parameter}, {.learning_rate = 0.02});
      for (int step = 0; step < kSteps; ++step) {
        sgd.step(context);
        adamw.step(context);
      }
      return std::move(parameter.value);
    };
    // Two optimisers, each with its own rounding a step.
    compare("SGD and AdamW", run(context_, dtype), run(reference_, DType::kF64), dtype, 2 * kSteps);
  }
}

}  // namespace ladon::cli
