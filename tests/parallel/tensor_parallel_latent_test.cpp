// TensorParallelLatentAttention against a LatentAttention in one process: the same bits forward and
// over caches in both forms, gradients within the bounds of their sums, the same on every rank
// where ranks have the same parameter.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ladon/paged_kv_cache.h"
#include "parallel/latent_layers.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/isas.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class TensorParallelLatent : public testing::TestWithParam<Isa> {
 protected:
  Context context(int threads) const {
    return Context(ContextOptions{.num_threads = threads, .isa = GetParam()});
  }
  /// Calls body(whole layer, ranks, description).
  template <class Body>
  void for_each_layer(const Body& body) const {
    for (const int ranks : rank_counts()) {
      for (const LatentAttentionOptions& options : layer_options(ranks)) {
        body(whole_layer(options), ranks,
             std::to_string(ranks) + " ranks, query_rank " + std::to_string(options.query_rank));
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, TensorParallelLatent, testing::ValuesIn(runnable_isas()),
                         isa_test_name);

TEST_P(TensorParallelLatent, ForwardHasTheBitsOfOneProcess) {
  for_each_layer([&](LatentAttention whole, int ranks, const std::string& what) {
    const Tensor x = normal(whole.dtype(), {2, 33, kEmbed}, 1);
    const Tensor bias = normal(DType::kF32, {1, whole.num_heads(), 33, 1}, 2);
    const std::int64_t lengths[] = {33, 17};
    const LayerCall call{.bias = bias, .kv_lengths = lengths};
    for (const LatentForm form : kForms) {
      whole.set_form(form);
      const Tensor expected = whole.forward(context(2), x, call);
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const Context own = context(1);
        TensorParallelLatentAttention layer(communicator, whole.options());
        layer.set_whole_parameters(own, whole);
        EXPECT_TRUE(same_bits(layer.forward(own, x, call), expected)) << what;
        const std::int64_t rank = communicator.rank();
        const std::int64_t rows = kEmbed * (rank + 1) / ranks - kEmbed * rank / ranks;
        EXPECT_EQ(communicator.statistics().bytes_sent,
                  (ranks - 1) * 2 * 33 * (2 * whole.value_dim() + rows) *
                      static_cast<std::int64_t>(size_of(whole.dtype())));
      }));
    }
  });
}

TEST_P(TensorParallelLatent, CachesHaveTheBitsOfOneProcess) {
  for_each_layer([&](LatentAttention whole, int ranks, const std::string& what) {
    const Tensor x = normal(whole.dtype(), {2, 24, kEmbed}, 1);
    const auto decode = [&](const Context& where, const AttentionLayer& layer, bool paged) {
      std::shared_ptr<PagePool> pool;
      if (paged) {
        pool = std::make_shared<PagePool>(where, layer.cache_options(), 4, 16);
      }
      KvCache cache =
          paged ? KvCache::paged(pool, 2) : KvCache::contiguous(where, layer.cache_options(2));
      Tensor out(whole.dtype(), x.shape());
      const std::int64_t chunks[] = {0, 19, 20, 24};
      for (std::size_t i = 0; i + 1 < std::size(chunks); ++i) {
        const TensorView to = out.view().slice(1, chunks[i], chunks[i + 1]);
        copy(where,
             layer.forward(
                 where, Tensor::copy_of(where, x.view().slice(1, chunks[i], chunks[i + 1])), cache),
             to);
      }
      EXPECT_EQ(cache.length(1), 24);
      return out;
    };
    for (const LatentForm form : kForms) {
      whole.set_form(form);
      const bool paged = form == LatentForm::kAbsorbed;
      const Tensor expected = decode(context(2), whole, paged);
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const Context own = context(1);
        TensorParallelLatentAttention layer(communicator, whole.options());
        layer.set_whole_parameters(own, whole);
        EXPECT_TRUE(same_bits(decode(own, layer, paged), expected)) << what;
      }));
    }
  });
}

TEST_P(TensorParallelLatent, GradientsAreThoseOfOneProcess) {
  for_each_layer([&](LatentAttention whole, int ranks, const std::string& what) {
    const Context one = context(2);
    const Tensor query = normal(whole.dtype(), {2, 21, kEmbed}, 1);
    const Tensor key = normal(whole.dtype(), {2, 25, kEmbed}, 2);
    const Tensor dout = normal(whole.dtype(), query.shape(), 3);
    const LayerInputs inputs{.query = query, .key = key};
    const TrainingForward forward = whole.forward_training(one, inputs);
    const InputGradients expected = whole.backward(one, dout, forward.saved);
    // bf16 gradients of attended values are rounded after a sum of another order.
    const double tolerance = whole.dtype() == DType::kBF16 ? 0.03 : 2e-5;
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      TensorParallelLatentAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      const TrainingForward mine = layer.forward_training(own, inputs);
      EXPECT_TRUE(same_bits(mine.out, forward.out)) << what;
      communicator.reset_statistics();
      const InputGradients got = layer.backward(own, dout, mine.saved);
      const std::int64_t query_width = whole.query_rank() == 0 ? kEmbed : kQueryRank;
      EXPECT_EQ(communicator.statistics().bytes_sent,
                4 * (ranks - 1) * 2 * 21 * layer.own_options().num_heads * whole.value_dim() +
                    all_reduce_bytes(2 * 21 * query_width, communicator.rank(), ranks) +
                    all_reduce_bytes(2 * 25 * whole.latent_dim(), communicator.rank(), ranks));
      expect_near(got.query, expected.query, tolerance, "query, " + what);
      expect_near(got.key, expected.key, tolerance, "key, " + what);
      expect_gradients_near(layer, whole, tolerance, what);
      for (const Parameter& parameter : layer.named_parameters()) {
        if (layer.slice_of(parameter.name, 0).end_rank != ranks) continue;
        expect_same_on_all(communicator, parameter.gradient, parameter.name + ", " + what);
      }
    }));
  });
}

TEST(TensorParallelLatentErrors, WhatRanksMustHaveInCommon) {
  const LatentAttentionOptions options{
      .embed_dim = 8, .num_heads = 4, .kv_rank = 4, .nope_dim = 4, .rope_dim = 2};
  expect_all_return(run_ranks(3, [&](Communicator& communicator) {
    EXPECT_EQ(error_of([&] { TensorParallelLatentAttention(communicator, options); }),
              "TensorParallelLatentAttention: num_heads: got 4 for 3 ranks, expected a multiple of "
              "the ranks");
  }));
  expect_all_return(run_ranks(2, [&](Communicator& communicator) {
    LatentAttentionOptions own_options = options;
    if (communicator.rank() == 1) own_options.rope.base = 500;
    TensorParallelLatentAttention layer(communicator, own_options);
    const Tensor x(DType::kF32, {1, 3, 8});
    const std::string message =
        error_of([&] { layer.forward(host_context(), x); }, ErrorCode::kCommunication);
    EXPECT_NE(message.find("ranks disagree: rope.base: 10000 on rank 0, 500 on rank 1"),
              std::string::npos)
        << message;
    Tensor weights(DType::kF32, {1, 4, 3, 3});
    TensorParallelLatentAttention same(communicator, options);
    EXPECT_EQ(error_of([&] { same.forward(host_context(), x, {.weights = weights}); },
                       ErrorCode::kUnsupported),
              "TensorParallelLatentAttention::forward: weights: got a tensor, expected none: each "
              "rank has the weights of its own heads alone");
    KvCache cache = KvCache::contiguous(host_context(), same.cache_options());
    same.forward(host_context(), x, cache);
    // Rank 1 brings another number of tokens: no rank's cache grows.
    const Tensor other(DType::kF32, {1, communicator.rank() == 0 ? 1 : 2, 8});
    error_of([&] { same.forward(host_context(), other, cache); }, ErrorCode::kCommunication);
    EXPECT_EQ(cache.length(0), 3);
  }));
}

}  // namespace
}  // namespace ladon::test
