// Bits of both layers: forward, gradients, and calls over every kind of cache.

#include <algorithm>
#include <vector>

#include "bits/bit_cases.h"
#include "cache/cache_support.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

Tensor random_input(Random& random, DType dtype, const Dims& shape) {
  Tensor tensor(dtype, shape);
  fill_normal(host_context(), tensor, 0, 1, random.next_u64());
  return tensor;
}

MultiHeadAttentionOptions random_options(Random& random) {
  MultiHeadAttentionOptions options;
  options.embed_dim = 8 + random.below(70);
  options.num_kv_heads = 1 + random.below(3);
  options.num_heads = options.num_kv_heads * (1 + random.below(4));
  options.head_dim = pick(random, {6, 16, 18, 64});
  options.query_bias = chance(random, 0.5);
  options.key_bias = chance(random, 0.5);
  options.value_bias = chance(random, 0.5);
  options.out_bias = chance(random, 0.5);
  options.causal = chance(random, 0.7);
  if (chance(random, 0.6)) {
    options.rope =
        RopeOptions{.layout = pick(random, {RopeLayout::kHalfSplit, RopeLayout::kInterleaved}),
                    .rotary_dim = pick(random, {0, 4})};
  }
  options.qk_norm = chance(random, 0.5);
  if (chance(random, 0.2)) options.softcap = 5;
  if (chance(random, 0.3)) options.window_left = 10;
  if (chance(random, 0.2)) {
    for (std::int64_t h = 0; h < options.num_heads; ++h) {
      options.alibi_slopes.push_back(0.1 * static_cast<double>(h + 1));
    }
  }
  options.sinks = chance(random, 0.3);
  options.dropout = chance(random, 0.3) ? 0.2 : 0;
  options.dtype = pick_float(random);
  return options;
}

LatentAttentionOptions random_latent(Random& random) {
  LatentAttentionOptions options;
  options.embed_dim = 8 + random.below(60);
  options.num_heads = 1 + random.below(6);
  options.query_rank = chance(random, 0.5) ? 5 + random.below(20) : 0;
  options.nope_dim = 4 + random.below(28);
  options.rope_dim = 2 * random.below(9);
  options.value_dim = 3 + random.below(30);
  options.kv_rank = 1 + random.below(std::min<std::int64_t>(
                            40, options.num_heads * (options.nope_dim + options.value_dim) - 1));
  options.query_bias = chance(random, 0.3);
  options.kv_bias = chance(random, 0.3);
  options.out_bias = chance(random, 0.3);
  options.query_norm = chance(random, 0.7);
  options.kv_norm = chance(random, 0.7);
  options.causal = chance(random, 0.8);
  options.dropout = chance(random, 0.2) ? 0.2 : 0;
  options.form = pick(random, {LatentForm::kAuto, LatentForm::kExpanded, LatentForm::kAbsorbed});
  options.dtype = pick_float(random);
  return options;
}

/// Forward in both modes, and all gradients of two steps.
void run_layer(const Context& context, Random& random, AttentionLayer& layer, BitHashes& hashes) {
  const std::int64_t batch = 1 + random.below(3);
  const std::int64_t seq = pick(random, {1, 2, 9, 33, 70});
  const Tensor x = random_input(random, layer.dtype(), {batch, seq, layer.embed_dim()});
  LayerCall call;
  std::vector<std::int64_t> lengths;
  if (chance(random, 0.3)) {
    for (std::int64_t b = 0; b < batch; ++b) lengths.push_back(1 + random.below(seq));
    call.kv_lengths = lengths;
  }
  if (chance(random, 0.3)) call.query_positions = call.key_positions = {.first = 17};
  call.dropout_seed = random.next_u64();
  for (int step = 0; step < 2; ++step) {
    const TrainingForward forward = layer.forward_training(context, {.query = x}, call);
    hashes.add("training_out", forward.out.view());
    const Tensor dout = random_input(random, layer.dtype(), x.shape());
    const InputGradients gradients = layer.backward(context, dout, forward.saved);
    hashes.add("dx", gradients.query.view());
    for (const Parameter& parameter : layer.named_parameters()) {
      hashes.add(parameter.name, parameter.gradient.view());
    }
  }
  layer.eval();
  Tensor weights(DType::kF32, {batch, layer.num_heads(), seq, seq});
  if (chance(random, 0.3)) call.weights = weights;
  const Tensor out = layer.forward(context, x, call);
  hashes.add("out", out.view());
  hashes.add("weights", weights.view());
}

/// Chunks of several lengths over a cache; sequences have lengths of their own.
void run_cached(const Context& context, Random& random, AttentionLayer& layer,
                const CacheKind& kind, BitHashes& hashes) {
  layer.eval();
  const std::int64_t batch = 1 + random.below(3);
  DType stored = chance(random, 0.4)
                     ? layer.dtype()
                     : pick(random, {DType::kF32, DType::kBF16, DType::kF16, DType::kI8});
  KvCache cache = make_cache(context, kind, layer.cache_options(batch, stored));
  for (const std::int64_t seq : {std::int64_t{12}, std::int64_t{1}, std::int64_t{1},
                                 1 + random.below(40), std::int64_t{1}}) {
    CachedCall call;
    std::vector<std::int64_t> lengths;
    if (seq > 1 && chance(random, 0.5)) {
      for (std::int64_t b = 0; b < batch; ++b) lengths.push_back(random.below(seq + 1));
      call.new_lengths = lengths;
    }
    const Tensor x = random_input(random, layer.dtype(), {batch, seq, layer.embed_dim()});
    if (chance(random, 0.2)) {
      CachedForward forward = layer.forward_from(context, x, cache, call);
      hashes.add("out", forward.out.view());
      cache = std::move(forward.cache);
    } else {
      const Tensor out = layer.forward(context, x, cache, call);
      hashes.add("out", out.view());
    }
  }
  double sum = 0;
  for (const double number : content_of(cache, 0)) sum = sum * 0.999 + number;
  hashes.add("content", sum);
}

}  // namespace

void run_multi_head(const Context& context, Random& random, BitHashes& hashes) {
  MultiHeadAttention layer(random_options(random), random.next_u64());
  run_layer(context, random, layer, hashes);
}

void run_multi_head_cached(const Context& context, Random& random, BitHashes& hashes) {
  MultiHeadAttentionOptions options = random_options(random);
  std::vector<CacheKind> kinds = unlimited_kinds();
  if (chance(random, 0.3)) {
    options.window_left = 10;
    kinds = {{"window", 0, 10}};
  }
  MultiHeadAttention layer(options, random.next_u64());
  const auto count = static_cast<std::int64_t>(kinds.size());
  run_cached(context, random, layer, kinds[static_cast<std::size_t>(random.below(count))], hashes);
}

void run_latent(const Context& context, Random& random, BitHashes& hashes) {
  LatentAttention layer(random_latent(random), random.next_u64());
  run_layer(context, random, layer, hashes);
}

void run_latent_cached(const Context& context, Random& random, BitHashes& hashes) {
  LatentAttention layer(random_latent(random), random.next_u64());
  const std::vector<CacheKind> kinds = unlimited_kinds();
  const auto count = static_cast<std::int64_t>(kinds.size());
  run_cached(context, random, layer, kinds[static_cast<std::size_t>(random.below(count))], hashes);
}

}  // namespace ladon::test
