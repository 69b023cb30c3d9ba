// Ranks whose tensors are on a device: the pretended one, where nothing but operations may touch
// memory, and a GPU where there is one.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "ladon/context_parallel.h"
#include "ladon/context_parallel_latent.h"
#include "ladon/random.h"
#include "ladon/spread_cache.h"
#include "ladon/tensor_parallel.h"
#include "parallel/ranks.h"
#include "support/contexts.h"

namespace ladon::test {
namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 40;

Tensor normal_on(const Context& context, const Dims& shape, std::uint64_t seed) {
  Tensor tensor(context, DType::kF32, shape);
  fill_normal(context, tensor, 0, 1, seed);
  return tensor;
}

/// The elements of all results of one rank.
using Results = std::vector<std::vector<double>>;

Results run_context_parallel(const Context& context, Communicator& communicator,
                             ContextScheme scheme) {
  const Tensor bias = normal_on(context, {1, 4, 1, kTokens}, 9);
  const Tensor sinks = normal_on(context, {4}, 8);
  const AttentionOptions options{.causal = true, .bias = bias, .sinks = sinks};
  ContextPlan plan = plan_context(kRanks, kTokens, kTokens);
  plan.scheme = scheme;
  const auto rank = static_cast<std::uint64_t>(communicator.rank());
  const Tensor q = normal_on(context, {1, kTokens / kRanks, 4, 8}, 1 + 10 * rank);
  const Tensor k = normal_on(context, {1, kTokens / kRanks, 2, 8}, 2 + 10 * rank);
  const Tensor dout = normal_on(context, q.shape(), 3 + 10 * rank);
  Tensor out(context, DType::kF32, q.shape());
  Tensor lse(context, DType::kF32, {1, 4, q.size(1)});
  Tensor dq(context, DType::kF32, q.shape());
  Tensor dk(context, DType::kF32, k.shape());
  Tensor dv(context, DType::kF32, k.shape());
  Tensor dbias(context, DType::kF32, bias.shape());
  Tensor dsinks(context, DType::kF32, sinks.shape());
  context_parallel_attention(context, communicator, q, k, k, options, plan, out, lse);
  context_parallel_attention_backward(
      context, communicator, q, k, k, options, plan, {.out = out, .lse = lse, .dout = dout},
      {.dq = dq, .dk = dk, .dv = dv, .dbias = dbias, .dsinks = dsinks});
  Results results;
  for (const Tensor* tensor : {&out, &lse, &dq, &dk, &dv, &dbias, &dsinks}) {
    results.push_back(elements_of(*tensor));
  }
  return results;
}

template <class Whole, class Layer, class Options>
Results run_tensor_parallel(const Context& context, Communicator& communicator,
                            const Options& options) {
  const Whole whole(options, 3);
  Layer layer(communicator, options);
  const Context host(ContextOptions{.num_threads = 1});
  layer.set_whole_parameters(host, whole);
  layer.to(context);
  const Tensor x = normal_on(context, {2, 9, 12}, 1);
  KvCache cache = KvCache::contiguous(context, layer.cache_options(2));
  Results results;
  results.push_back(elements_of(layer.forward(context, x, cache)));
  const TrainingForward forward = layer.forward_training(context, {.query = x});
  results.push_back(elements_of(forward.out));
  results.push_back(elements_of(layer.backward(context, x, forward.saved).query));
  EXPECT_GT(layer.clip_gradients(context, 0.1), 0);
  for (const Parameter& parameter : layer.named_parameters()) {
    results.push_back(elements_of(parameter.gradient));
    results.push_back(elements_of(layer.whole_parameter(context, parameter.name)));
  }
  return results;
}

Results run_spread_cache(const Context& context, Communicator& communicator) {
  const KvCacheOptions options{
      .batch = 1, .num_kv_heads = 2, .head_dim = 8, .num_heads = 4, .format = DType::kF32};
  SpreadKvCache cache(communicator, KvCache::contiguous(context, options));
  const Tensor q = normal_on(context, {1, 700, 4, 8}, 1);
  const Tensor k = normal_on(context, {1, 700, 2, 8}, 2);
  Tensor out(context, DType::kF32, q.shape());
  append_and_attend(context, cache, q, k, k, {.causal = true}, out);
  return {elements_of(out)};
}

Results run_context_latent(const Context& context, Communicator& communicator) {
  LatentAttention layer({.embed_dim = 12,
                         .num_heads = 4,
                         .query_rank = 5,
                         .kv_rank = 6,
                         .nope_dim = 4,
                         .rope_dim = 2,
                         .causal = true},
                        3);
  layer.to(context);
  const auto rank = static_cast<std::uint64_t>(communicator.rank());
  const Tensor x = normal_on(context, {1, kTokens / kRanks, 12}, 1 + rank);
  const ContextPlan plan = plan_context(kRanks, kTokens, kTokens);
  Results results;
  for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
    layer.set_form(form);
    results.push_back(
        elements_of(context_parallel_forward(context, communicator, layer, {.query = x}, plan)));
  }
  const TrainingForward forward =
      context_parallel_forward_training(context, communicator, layer, {.query = x}, plan);
  results.push_back(
      elements_of(context_parallel_backward(context, communicator, layer, x, forward.saved).query));
  for (const Parameter& parameter : layer.named_parameters()) {
    results.push_back(elements_of(parameter.gradient));
  }
  return results;
}

/// The pretended device computes as the host does, to the bit; a GPU comes near.
void expect_same(const Results& got, const Results& expected, bool exactly) {
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    if (exactly) {
      EXPECT_EQ(got[i], expected[i]) << "result " << i;
      continue;
    }
    ASSERT_EQ(got[i].size(), expected[i].size());
    for (std::size_t j = 0; j < got[i].size(); ++j) {
      ASSERT_NEAR(got[i][j], expected[i][j], 1e-4) << "result " << i;
    }
  }
}

TEST(DeviceRanks, ResultsAreThoseOfTheHost) {
  for (const Place& place : fastest_places()) {
    if (place.is_cpu()) continue;
    expect_all_return(run_ranks(kRanks, [&](Communicator& communicator) {
      const Context there = place.context(1);
      const Context here(ContextOptions{.num_threads = 1, .isa = place.isa});
      for (const ContextScheme scheme :
           {ContextScheme::kAllGather, ContextScheme::kRing, ContextScheme::kUlysses}) {
        expect_same(run_context_parallel(there, communicator, scheme),
                    run_context_parallel(here, communicator, scheme), !place.is_cuda());
      }
      const auto run_multi_head = [&](const Context& where) {
        return run_tensor_parallel<MultiHeadAttention, TensorParallelAttention>(
            where, communicator,
            MultiHeadAttentionOptions{.embed_dim = 12,
                                      .num_heads = 4,
                                      .num_kv_heads = 1,
                                      .head_dim = 8,
                                      .causal = true,
                                      .rope = RopeOptions{},
                                      .qk_norm = true});
      };
      expect_same(run_multi_head(there), run_multi_head(here), !place.is_cuda());
      const auto run_latent = [&](const Context& where) {
        return run_tensor_parallel<LatentAttention, TensorParallelLatentAttention>(
            where, communicator,
            LatentAttentionOptions{.embed_dim = 12,
                                   .num_heads = 4,
                                   .query_rank = 5,
                                   .kv_rank = 6,
                                   .nope_dim = 4,
                                   .rope_dim = 2,
                                   .causal = true});
      };
      expect_same(run_latent(there), run_latent(here), !place.is_cuda());
      expect_same(run_spread_cache(there, communicator), run_spread_cache(here, communicator),
                  !place.is_cuda());
      expect_same(run_context_latent(there, communicator), run_context_latent(here, communicator),
                  !place.is_cuda());
      const Tensor part = normal_on(there, {3}, 1);
      Tensor all(there, DType::kF32, {kRanks, 3});
      all_gather(there, communicator, part, all);
      Tensor sum(there, DType::kF32, {3});
      reduce_scatter(there, communicator, all, sum);
      std::vector<double> expected = elements_of(part);
      for (double& element : expected) element *= kRanks;
      EXPECT_EQ(elements_of(sum), expected);
    }));
  }
}

}  // namespace
}  // namespace ladon::test
