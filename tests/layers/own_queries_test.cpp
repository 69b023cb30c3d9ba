// Queries that are not the tokens whose keys they see: a key input of its own over latents, and
// cached calls that append one token and attend with another.

#include <gtest/gtest.h>

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

class OwnQueries : public ContextTest {
 protected:
  LatentAttention latent(DType dtype = DType::kF64, std::int64_t nope_dim = 6,
                         bool causal = false) const {
    return there(LatentAttention({.embed_dim = 20,
                                  .num_heads = 3,
                                  .query_rank = 7,
                                  .kv_rank = 9,
                                  .nope_dim = nope_dim,
                                  .rope_dim = 4,
                                  .value_dim = 5,
                                  .causal = causal,
                                  .dtype = dtype},
                                 3));
  }
  MultiHeadAttention multi_head(bool causal = false) const {
    return there(MultiHeadAttention({.embed_dim = 20,
                                     .num_heads = 4,
                                     .num_kv_heads = 2,
                                     .head_dim = 6,
                                     .causal = causal,
                                     .rope = RopeOptions{},
                                     .dtype = DType::kF64},
                                    3));
  }

  /// Tokens of one input after those of the other.
  Tensor joined(const Tensor& first, const Tensor& second) const {
    Tensor both(context_, first.dtype(),
                {first.size(0), first.size(1) + second.size(1), first.size(2)});
    copy(context_, first, both.view().slice(1, 0, first.size(1)));
    copy(context_, second, both.view().slice(1, first.size(1), both.size(1)));
    return both;
  }
};

/// Self-attention over keys and queries in one sequence, where the queries are hidden from all: its
/// last rows are the answer.
struct Hidden {
  Hidden(const Context& context, std::int64_t keys, std::int64_t queries)
      : mask(Tensor::from_values(DType::kBool, {1, 1, 1, keys + queries},
                                 [&] {
                                   std::vector<double> seen(static_cast<std::size_t>(keys), 1);
                                   seen.resize(static_cast<std::size_t>(keys + queries), 0);
                                   return seen;
                                 }())
                 .to(context)),
        positions(static_cast<std::size_t>(keys + queries)) {
    std::iota(positions.begin(), positions.begin() + keys, 0);
    std::iota(positions.begin() + keys, positions.end(), 0);
  }
  LayerCall call() const {
    return {.mask = mask,
            .query_positions = {.explicit_positions = positions},
            .key_positions = {.explicit_positions = positions}};
  }
  Tensor mask;
  std::vector<std::int64_t> positions;
};

TEST_P(OwnQueries, LatentsOfAnotherInput) {
  for (const std::int64_t nope_dim : {6, 0}) {
    LatentAttention layer = latent(DType::kF64, nope_dim);
    const Tensor query = normal(DType::kF64, {2, 4, 20}, 1);
    const Tensor key = normal(DType::kF64, {2, 7, 20}, 2);
    const Hidden hidden(context_, 7, 4);
    const Tensor both = joined(key, query);
    layer.set_form(LatentForm::kExpanded);
    const Tensor truth = layer.forward(context_, both, hidden.call());
    const Tensor expected = host_copy(context_, truth.view().slice(1, 7, 11));
    for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
      layer.set_form(form);
      EXPECT_LE(
          relative_difference(layer.forward(context_, {.query = query, .key = key}), expected),
          1e-12);
    }
    const Tensor alone = layer.forward(
        context_, {.query = query.view().select(0, 0), .key = key.view().select(0, 0)});
    EXPECT_EQ(alone.shape(), (Dims{4, 20}));
  }
}

TEST_P(OwnQueries, GradientsOfLatentsOfAnotherInput) {
  LatentAttention layer = latent();
  LatentAttention twin = layer;
  const Tensor query = normal(DType::kF64, {2, 4, 20}, 1);
  const Tensor key = normal(DType::kF64, {2, 7, 20}, 2);
  const Tensor grad = normal(DType::kF64, {2, 4, 20}, 3);
  const TrainingForward own = layer.forward_training(context_, {.query = query, .key = key});
  const InputGradients got = layer.backward(context_, grad, own.saved);

  const Hidden hidden(context_, 7, 4);
  const TrainingForward all =
      twin.forward_training(context_, {.query = joined(key, query)}, hidden.call());
  const Tensor none(context_, DType::kF64, key.shape());
  const InputGradients expected = twin.backward(context_, joined(none, grad), all.saved);
  EXPECT_LE(
      relative_difference(got.query, host_copy(context_, expected.query.view().slice(1, 7, 11))),
      1e-11);
  EXPECT_LE(relative_difference(got.key, host_copy(context_, expected.query.view().slice(1, 0, 7))),
            1e-11);
  for (std::size_t i = 0; i < layer.named_parameters().size(); ++i) {
    EXPECT_LE(relative_difference(layer.named_parameters()[i].gradient,
                                  twin.named_parameters()[i].gradient),
              1e-11)
        << layer.named_parameters()[i].name;
  }
}

/// Appends x to the past and attends with other queries at other positions.
template <class Layer>
void expect_cached_queries(const Context& context, const Layer& layer, const Tensor& past,
                           const Tensor& x, const Tensor& all, const Tensor& query, bool paged,
                           bool causal) {
  const KvCacheOptions options = layer.cache_options(2);
  KvCache cache =
      make_cache(context, paged ? CacheKind{"paged", 4} : CacheKind{"contiguous"}, options);
  layer.forward(context, past, cache);
  std::vector<std::int64_t> positions;
  for (std::int64_t i = 0; i < 2 * x.size(1); ++i) positions.push_back(40 - 3 * i);
  const Tensor got = layer.forward(
      context, x, cache, {.causal = causal, .query = query, .query_positions = positions});
  EXPECT_EQ(cache.length(0), past.size(1) + x.size(1));
  LayerCall call{.causal = causal};
  call.query_positions.explicit_positions = positions;
  const Tensor truth = layer.forward(context, {.query = query, .key = all}, call);
  EXPECT_LE(relative_difference(got, truth), 1e-12);
}

TEST_P(OwnQueries, CachedStepsWithAQueryOfTheirOwn) {
  const Tensor past = normal(DType::kF64, {2, 6, 20}, 1);
  for (const std::int64_t tokens : {1, 3}) {
    const Tensor x = normal(DType::kF64, {2, tokens, 20}, 2);
    const Tensor query = normal(DType::kF64, {2, tokens, 20}, 3);
    const Tensor all = joined(past, x);
    for (const bool causal : {false, true}) {
      for (const bool paged : {false, true}) {
        LatentAttention layer = latent();
        for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
          layer.set_form(form);
          expect_cached_queries(context_, layer, past, x, all, query, paged, causal);
        }
        expect_cached_queries(context_, multi_head(), past, x, all, query, paged, causal);
      }
    }
  }
}

// Without a causal mask every new token sees the whole chunk, and all that came before; the call
// decides, whatever the layer's options say.
TEST_P(OwnQueries, ChunksThatAreNotCausalSeeAllOfThemselves) {
  const Tensor past = normal(DType::kF64, {2, 6, 20}, 1);
  const Tensor x = normal(DType::kF64, {2, 3, 20}, 2);
  const Tensor all = joined(past, x);
  const auto expect_whole = [&](const auto& layer) {
    KvCache cache = KvCache::contiguous(context_, layer.cache_options(2));
    layer.forward(context_, past, cache, {.causal = true});
    const Tensor got = layer.forward(context_, x, cache, {.causal = false});
    const Tensor whole = layer.forward(context_, all, {.causal = false});
    EXPECT_LE(relative_difference(got, host_copy(context_, whole.view().slice(1, 6, 9))), 1e-12);
  };
  for (const bool causal : {false, true}) {
    expect_whole(multi_head(causal));
    expect_whole(latent(DType::kF64, 6, causal));
  }
}

TEST_P(OwnQueries, PaddedTokensAndTheirQueries) {
  const LatentAttention layer = latent();
  const Tensor x = normal(DType::kF64, {2, 3, 20}, 1);
  const Tensor query = normal(DType::kF64, {2, 3, 20}, 2);
  const std::vector<std::int64_t> lengths = {3, 2};
  const std::vector<std::int64_t> positions = {5, 6, 7, 8, 9, 10};
  KvCache cache = KvCache::contiguous(context_, layer.cache_options(2));
  const Tensor got = layer.forward(
      context_, x, cache, {.new_lengths = lengths, .query = query, .query_positions = positions});
  for (std::int64_t b = 0; b < 2; ++b) {
    const std::int64_t count = lengths[static_cast<std::size_t>(b)];
    LayerCall call;
    call.query_positions.first = positions[static_cast<std::size_t>(3 * b)];
    const Tensor alone = layer.forward(context_,
                                       {.query = query.view().select(0, b).slice(0, 0, count),
                                        .key = x.view().select(0, b).slice(0, 0, count)},
                                       call);
    EXPECT_LE(
        relative_difference(host_copy(context_, got.view().select(0, b).slice(0, 0, count)), alone),
        1e-12);
  }
}

// Queries without keys see nothing, which is 0; no queries give no rows.
TEST_P(OwnQueries, EmptyInputsOfLatents) {
  LatentAttention layer = latent();
  const Tensor query = normal(DType::kF64, {2, 4, 20}, 1);
  const Tensor none(context_, DType::kF64, {2, 0, 20});
  for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
    layer.set_form(form);
    const Tensor zeros = layer.forward(context_, {.query = query, .key = none});
    EXPECT_EQ(elements_of(zeros), std::vector<double>(2 * 4 * 20, 0.0));
    EXPECT_EQ(layer.forward(context_, none).shape(), (Dims{2, 0, 20}));
    EXPECT_EQ(layer.forward(context_, {.query = none, .key = query}).shape(), (Dims{2, 0, 20}));
    KvCache cache = KvCache::contiguous(context_, layer.cache_options(2));
    EXPECT_EQ(layer.forward(context_, none, cache).shape(), (Dims{2, 0, 20}));
    EXPECT_EQ(cache.length(0), 0);
  }
}

TEST_P(OwnQueries, WhatDoesNotFitIsRefused) {
  const LatentAttention layer = latent();
  KvCache cache = KvCache::contiguous(context_, layer.cache_options(1));
  const Tensor x = normal(DType::kF64, {1, 2, 20}, 1);
  const Tensor longer = normal(DType::kF64, {1, 3, 20}, 1);
  EXPECT_EQ(error_of([&] { layer.forward(context_, x, cache, {.query = longer}); }),
            "LatentAttention::forward: query: got [1, 3, 20], expected [1, 2, 20]");
  const std::vector<std::int64_t> positions = {1, 2, 3};
  EXPECT_EQ(error_of([&] { layer.forward(context_, x, cache, {.query_positions = positions}); }),
            "LatentAttention::forward: query_positions: got 3 positions, expected 2: one for each "
            "token of x");
  EXPECT_EQ(cache.length(), 0);
}

LADON_FOR_EACH_CONTEXT(OwnQueries);

}  // namespace
}  // namespace ladon::test
