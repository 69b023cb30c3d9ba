// LatentAttention: its two forms agree, chunks through a cache give what the whole sequence gives,
// and an independent plain implementation says the same.

#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/latent_attention.h"
#include "layers/latent_truth.h"
#include "support/contexts.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

class LatentForward : public ContextTest {};

LatentAttentionOptions small_options(DType dtype) {
  return {.embed_dim = 20,
          .num_heads = 3,
          .query_rank = 7,
          .kv_rank = 9,
          .nope_dim = 6,
          .rope_dim = 4,
          .value_dim = 5,
          .causal = true,
          .dtype = dtype};
}

RopeOptions yarn() {
  RopeOptions rope{.layout = RopeLayout::kInterleaved};
  rope.scaling = {.kind = RopeScaling::kYarn,
                  .factor = 4,
                  .original_context = 16,
                  .mscale = 0.707,
                  .mscale_all_dim = 0.8};
  return rope;
}

struct Variant {
  std::string name;
  LatentAttentionOptions options;
};

/// With and without a query rank, norms, rope, yarn and biases.
std::vector<Variant> variants(DType dtype) {
  std::vector<Variant> all;
  const auto add = [&](std::string name, auto&& change) {
    LatentAttentionOptions options = small_options(dtype);
    change(options);
    all.push_back({std::move(name), options});
  };
  add("plain", [](LatentAttentionOptions&) {});
  add("direct queries", [](LatentAttentionOptions& o) { o.query_rank = 0; });
  add("no norms", [](LatentAttentionOptions& o) { o.query_norm = o.kv_norm = false; });
  add("no rope", [](LatentAttentionOptions& o) { o.rope_dim = 0; });
  add("rope alone", [](LatentAttentionOptions& o) { o.nope_dim = 0; });
  add("yarn", [](LatentAttentionOptions& o) { o.rope = yarn(); });
  add("frequencies", [](LatentAttentionOptions& o) {
    o.rope.frequencies = {0.3, 0.3};
    o.rope.magnitude = 1.25;
  });
  add("half-split", [](LatentAttentionOptions& o) { o.rope.layout = RopeLayout::kHalfSplit; });
  add("biases", [](LatentAttentionOptions& o) { o.query_bias = o.kv_bias = o.out_bias = true; });
  add("biases, direct", [](LatentAttentionOptions& o) {
    o.query_rank = 0;
    o.query_bias = o.kv_bias = o.out_bias = true;
  });
  add("own scale", [](LatentAttentionOptions& o) { o.scale = -0.3; });
  add("both ways", [](LatentAttentionOptions& o) { o.causal = false; });
  return all;
}

/// On the host. Biases and norms are not the 0 and 1 of a new layer.
LatentAttention make_layer(const LatentAttentionOptions& options) {
  LatentAttention layer(options, 3);
  std::uint64_t stream = 100;
  for (Parameter& parameter : layer.named_parameters()) {
    if (parameter.value.rank() == 1)
      fill_uniform(host_context(), parameter.value, 0.5, 1.5, 9, stream);
    ++stream;
  }
  return layer;
}

TEST_P(LatentForward, AgreesWithPlainLoops) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    const double bound = dtype == DType::kF64 ? 1e-10 : 1e-5;
    for (const Variant& variant : variants(dtype)) {
      SCOPED_TRACE(variant.name);
      const LatentAttention on_host = make_layer(variant.options);
      LatentAttention layer = there(on_host);
      const Tensor x = random_tensor(context_, dtype, {2, 11, 20}, 1);
      const Tensor truth = latent_truth(on_host, x.to_host(), {});
      for (const LatentForm form :
           {LatentForm::kExpanded, LatentForm::kAbsorbed, LatentForm::kAuto}) {
        layer.set_form(form);
        EXPECT_LE(relative_difference(layer.forward(context_, x), truth), bound);
      }
    }
  }
}

TEST_P(LatentForward, ExplicitPositionsAreUsed) {
  const std::vector<std::int64_t> positions = {3, 5, 6, 20, 21, 100, 7, 0, 1, 2, 50};
  for (const Variant& variant : variants(DType::kF64)) {
    const LatentAttention on_host = make_layer(variant.options);
    LatentAttention layer = there(on_host);
    const Tensor x = random_tensor(context_, DType::kF64, {2, 11, 20}, 1);
    const Tensor truth = latent_truth(on_host, x.to_host(), positions);
    LayerCall call;
    call.query_positions.explicit_positions = positions;
    call.key_positions.explicit_positions = positions;
    for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
      layer.set_form(form);
      EXPECT_LE(relative_difference(layer.forward(context_, x, call), truth), 1e-10)
          << variant.name;
    }
  }
}

TEST_P(LatentForward, MasksAndLengthsAreHonouredInBothForms) {
  LatentAttentionOptions options = small_options(DType::kF64);
  options.causal = false;
  LatentAttention layer = there(make_layer(options));
  const Tensor x = random_tensor(context_, DType::kF64, {2, 8, 20}, 1);
  const std::vector<std::int64_t> lengths = {8, 5};
  std::vector<double> seen;
  for (int i = 0; i < 2 * 8 * 8; ++i) seen.push_back(i % 5 != 1 ? 1 : 0);
  const Tensor mask = there(Tensor::from_values(DType::kBool, {2, 1, 8, 8}, seen));
  const Tensor bias = random_tensor(context_, DType::kF64, {1, 3, 8, 8}, 7);
  const LayerCall call{.mask = mask, .bias = bias, .kv_lengths = lengths};
  layer.set_form(LatentForm::kExpanded);
  Tensor expanded_weights(context_, DType::kF64, {2, 3, 8, 8});
  LayerCall first = call;
  first.weights = expanded_weights;
  const Tensor expanded = layer.forward(context_, x, first);
  layer.set_form(LatentForm::kAbsorbed);
  Tensor absorbed_weights(context_, DType::kF64, {2, 3, 8, 8});
  LayerCall second = call;
  second.weights = absorbed_weights;
  const Tensor absorbed = layer.forward(context_, x, second);
  EXPECT_LE(relative_difference(absorbed, expanded), 1e-10);
  EXPECT_LE(relative_difference(absorbed_weights, expanded_weights), 1e-10);
  // The lengths and the mask matter: hidden keys have no weight.
  const std::vector<double> weights = elements_of(expanded_weights);
  for (std::size_t q = 0; q < 8; ++q) EXPECT_EQ(weights[((1 * 3 + 0) * 8 + q) * 8 + 6], 0);
  // Padding is not read.
  Tensor padded = Tensor::copy_of(context_, x);
  const Tensor nothing = poisoned(context_, DType::kF64, {3, 20});
  copy(context_, nothing, padded.view().select(0, 1).slice(0, 5, 8));
  const std::vector<double> again = elements_of(layer.forward(context_, padded, call));
  const std::vector<double> before = elements_of(absorbed);
  for (std::size_t i = 0; i < (8 + 5) * 20; ++i) EXPECT_EQ(again[i], before[i]);
}

TEST_P(LatentForward, AnyChunkingThroughAnyCacheGivesTheWholeSequence) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    for (const Variant& variant : variants(dtype)) {
      if (!variant.options.causal) continue;
      LatentAttention layer = there(make_layer(variant.options));
      const Tensor x = random_tensor(context_, dtype, {3, 23, 20}, 1);
      const Tensor truth = layer.forward(context_, x);
      for (const CacheKind& kind : unlimited_kinds()) {
        for (const LatentForm form :
             {LatentForm::kExpanded, LatentForm::kAbsorbed, LatentForm::kAuto}) {
          SCOPED_TRACE(variant.name + " " + kind.name + " " + std::to_string(kind.page_size));
          layer.set_form(form);
          KvCache cache = make_cache(context_, kind, layer.cache_options(3));
          Tensor out(context_, dtype, {3, 23, 20});
          std::int64_t done = 0;
          for (const std::int64_t count : {5, 1, 1, 9, 0, 2, 5}) {
            Tensor part(context_, dtype, {3, count, 20});
            layer.forward(context_, x.view().slice(1, done, done + count), cache, {}, part);
            copy(context_, part, out.view().slice(1, done, done + count));
            done += count;
            poison_dead_slots(context_, {&cache});
          }
          EXPECT_LE(relative_difference(out, truth), dtype == DType::kF64 ? 1e-10 : 1e-5);
        }
      }
    }
  }
}

TEST_P(LatentForward, RaggedBatchesMixForms) {
  // One sequence decodes over a long past, another starts with a long chunk: each has its own form,
  // and the bits that it has alone.
  LatentAttentionOptions options = small_options(DType::kF32);
  options.kv_rank = 12;
  const LatentAttention layer = there(make_layer(options));
  EXPECT_EQ(layer.form_for(1, 200), LatentForm::kAbsorbed);
  EXPECT_EQ(layer.form_for(60, 60), LatentForm::kExpanded);
  const Tensor past = random_tensor(context_, DType::kF32, {200, 20}, 1);
  const Tensor fresh = random_tensor(context_, DType::kF32, {60, 20}, 2);
  const Tensor token = random_tensor(context_, DType::kF32, {1, 20}, 3);
  const KvCacheOptions one = layer.cache_options(1);
  KvCache first = KvCache::contiguous(context_, one);
  layer.forward(context_, past, first);
  const Tensor alone_token = layer.forward(context_, token, first);
  KvCache second = KvCache::contiguous(context_, one);
  const Tensor alone_fresh = layer.forward(context_, fresh, second);

  KvCache both = KvCache::contiguous(context_, layer.cache_options(3));
  layer.forward(context_, past, both, {.new_lengths = std::vector<std::int64_t>{200, 0, 0}});
  Tensor packed(context_, DType::kF32, {62, 20});
  copy(context_, token, packed.view().slice(0, 0, 1));
  copy(context_, fresh, packed.view().slice(0, 1, 61));
  copy(context_, token, packed.view().slice(0, 61, 62));
  const std::vector<std::int64_t> counts = {1, 60, 1};
  const Tensor together = layer.forward(context_, packed, both, {.new_lengths = counts});
  EXPECT_TRUE(same_bits(together.view().slice(0, 0, 1), alone_token.view()));
  EXPECT_TRUE(same_bits(together.view().slice(0, 1, 61), alone_fresh.view()));
}

TEST_P(LatentForward, EveryStorageServes) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const LatentAttention layer = there(make_layer(small_options(dtype)));
    const Tensor x = random_tensor(context_, dtype, {2, 20, 20}, 1);
    const Tensor truth = layer.forward(context_, x);
    for (const DType storage : kStorages) {
      for (const CacheKind& kind : unlimited_kinds()) {
        KvCache cache = make_cache(context_, kind, layer.cache_options(2, storage));
        layer.forward(context_, x.view().slice(1, 0, 12), cache);
        const Tensor rest = layer.forward(context_, x.view().slice(1, 12, 20), cache);
        const Tensor expected = Tensor::copy_of(context_, truth.view().slice(1, 12, 20));
        const double bound = storage == DType::kF8E4M3                        ? 0.2
                             : dtype == DType::kF32 && storage == DType::kF32 ? 1e-5
                                                                              : 0.06;
        EXPECT_LE(relative_difference(rest, expected), bound)
            << name_of(dtype) << " " << name_of(storage);
      }
    }
  }
}

TEST_P(LatentForward, StepsFitTogether) {
  const LatentAttention layer = there(make_layer(small_options(DType::kF64)));
  const Tensor x = random_tensor(context_, DType::kF64, {2, 5, 20}, 1);
  const Tensor latents_there = layer.compress(context_, x);
  const Tensor latents = latents_there.to_host();
  EXPECT_EQ(latents.shape(), (Dims{2, 5, 13}));
  const Tensor keys = layer.expand_keys(context_, latents_there).to_host();
  const Tensor values = layer.expand_values(context_, latents_there);
  EXPECT_EQ(keys.shape(), (Dims{2, 5, 3, 10}));
  EXPECT_EQ(values.shape(), (Dims{2, 5, 3, 5}));
  // The rope part of every head's key is the latent's own; a cache holds just the latents.
  KvCache cache = KvCache::contiguous(context_, layer.cache_options(2));
  layer.forward(context_, x, cache);
  const std::vector<double> held = content_of(context_, cache, 1);
  for (std::int64_t t = 0; t < 5; ++t) {
    for (std::int64_t i = 0; i < 13; ++i) {
      EXPECT_NEAR(number_at(latents, (5 + t) * 13 + i),
                  held[static_cast<std::size_t>(t * (13 + 9) + i)], 1e-13);
    }
    for (std::int64_t head = 0; head < 3; ++head) {
      for (std::int64_t i = 0; i < 4; ++i) {
        EXPECT_EQ(number_at(keys, (t * 3 + head) * 10 + 6 + i), number_at(latents, t * 13 + 9 + i));
      }
    }
  }
}

TEST_P(LatentForward, RopeKeepsNormsAndIsTheIdentityAtZero) {
  const LatentAttention layer = there(make_layer(small_options(DType::kF64)));
  const Tensor x = random_tensor(context_, DType::kF64, {1, 1, 20}, 1);
  const auto rope_part = [&](std::int64_t position) {
    const std::vector<double> latents =
        elements_of(layer.compress(context_, x, {.first = position}));
    return std::vector<double>(latents.begin() + 9, latents.end());
  };
  const auto norm = [](const std::vector<double>& v) {
    return std::sqrt(std::inner_product(v.begin(), v.end(), v.begin(), 0.0));
  };
  // At 0 it is the bare projection.
  const std::vector<double> at_zero = rope_part(0);
  const std::vector<double> w = elements_of(layer.parameter("kv_a_proj_with_mqa.weight").value);
  const std::vector<double> token = elements_of(x);
  for (std::size_t i = 0; i < 4; ++i) {
    double sum = 0;
    for (std::size_t j = 0; j < 20; ++j) sum += w[(9 + i) * 20 + j] * token[j];
    EXPECT_NEAR(at_zero[i], sum, 1e-14);
  }
  for (const std::int64_t position : {1, 7, 1000, 131072}) {
    EXPECT_NEAR(norm(rope_part(position)), norm(at_zero), 1e-12);
  }
}

LADON_FOR_EACH_CONTEXT(LatentForward);

}  // namespace
}  // namespace ladon::test
