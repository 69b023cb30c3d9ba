// TensorParallelAttention against a MultiHeadAttention in one process: the same bits forward and
// over caches, gradients within the bounds of their sums.
#include "ladon/tensor_parallel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "ladon/optim.h"
#include "parallel/layer_support.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/host_context.h"
#include "support/isas.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kEmbed = 29;  // no number of ranks divides it
constexpr std::int64_t kHeadDim = 8;

/// Layers with every option; KV heads as many as ranks, twice as many, half as many, or one.
std::vector<MultiHeadAttentionOptions> layer_options(int ranks) {
  const MultiHeadAttentionOptions plain{.embed_dim = kEmbed,
                                        .num_heads = 2 * ranks,
                                        .num_kv_heads = ranks,
                                        .head_dim = kHeadDim,
                                        .causal = true};
  std::vector<MultiHeadAttentionOptions> all{plain};
  MultiHeadAttentionOptions options = plain;
  options.num_kv_heads = 1;
  options.rope = RopeOptions{};
  options.qk_norm = true;
  options.query_bias = options.key_bias = options.value_bias = options.out_bias = true;
  options.sinks = true;
  all.push_back(options);
  options = plain;
  options.num_kv_heads = 2 * ranks;
  options.dtype = DType::kBF16;
  options.window_left = 9;
  options.softcap = 4;
  options.qk_norm = options.qk_norm_centered = true;
  options.qk_norm_span = QkNormSpan::kEachHead;
  for (int i = 0; i < 2 * ranks; ++i) options.alibi_slopes.push_back(0.5 / (i + 1));
  all.push_back(options);
  if (ranks > 2 && ranks % 2 == 0) {  // two ranks have the same KV head
    options = plain;
    options.num_kv_heads = ranks / 2;
    options.key_bias = true;
    options.qk_norm = true;
    options.qk_norm_span = QkNormSpan::kEachHead;
    all.push_back(options);
  }
  return all;
}

/// A whole layer with random biases, norms and sinks too.
MultiHeadAttention whole_layer(const MultiHeadAttentionOptions& options) {
  MultiHeadAttention layer(options, 5);
  randomise_vectors(layer);
  return layer;
}

class TensorParallel : public testing::TestWithParam<Isa> {
 protected:
  Context context(int threads) const {
    return Context(ContextOptions{.num_threads = threads, .isa = GetParam()});
  }
  /// Calls body(options, whole layer, ranks).
  template <class Body>
  void for_each_layer(const Body& body) const {
    for (const int ranks : rank_counts()) {
      for (const MultiHeadAttentionOptions& options : layer_options(ranks)) {
        body(whole_layer(options), ranks);
      }
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, TensorParallel, testing::ValuesIn(runnable_isas()), isa_test_name);

std::string describe(const MultiHeadAttention& layer, int ranks) {
  return std::to_string(ranks) + " ranks, " + std::to_string(layer.num_kv_heads()) + " KV heads";
}

TEST_P(TensorParallel, ForwardHasTheBitsOfOneProcess) {
  for_each_layer([&](const MultiHeadAttention& whole, int ranks) {
    const Tensor x = normal(whole.dtype(), {2, 33, kEmbed}, 1);
    const Tensor bias = normal(DType::kF32, {1, whole.num_heads(), 33, 1}, 2);
    const std::int64_t lengths[] = {33, 17};
    const LayerCall call{.bias = bias, .kv_lengths = lengths};
    const Tensor expected = whole.forward(context(2), x, call);
    const Tensor first_token = whole.forward(context(2), x.view().slice(1, 0, 1));
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      TensorParallelAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      const Tensor out = layer.forward(own, x, call);
      EXPECT_TRUE(same_bits(out, expected)) << describe(whole, ranks);
      const std::int64_t rank = communicator.rank();
      const std::int64_t rows = kEmbed * (rank + 1) / ranks - kEmbed * rank / ranks;
      EXPECT_EQ(communicator.statistics().bytes_sent,
                (ranks - 1) * 2 * 33 * (2 * kHeadDim + rows) *
                    static_cast<std::int64_t>(size_of(whole.dtype())));
      EXPECT_TRUE(same_bits(layer.forward(own, x.view().slice(1, 0, 1)), first_token));
    }));
  });
}

TEST_P(TensorParallel, CachesHaveTheBitsOfOneProcess) {
  for_each_layer([&](const MultiHeadAttention& whole, int ranks) {
    const Context one = context(2);
    const Tensor x = normal(whole.dtype(), {2, 24, kEmbed}, 1);
    const std::int64_t chunks[] = {0, 19, 20, 24};
    const auto decode = [&](const Context& where, const AttentionLayer& layer) {
      KvCache cache = KvCache::contiguous(where, layer.cache_options(2));
      Tensor out(whole.dtype(), x.shape());
      for (std::size_t i = 0; i + 1 < std::size(chunks); ++i) {
        const Tensor part = Tensor::copy_of(where, x.view().slice(1, chunks[i], chunks[i + 1]));
        const Tensor y = layer.forward(where, part, cache);
        copy(where, y, out.view().slice(1, chunks[i], chunks[i + 1]));
      }
      EXPECT_EQ(cache.length(1), 24);
      return out;
    };
    const Tensor expected = decode(one, whole);
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      TensorParallelAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      EXPECT_TRUE(same_bits(decode(own, layer), expected)) << describe(whole, ranks);
    }));
  });
}

/// What a rank sends in backward, for rows of queries and of keys.
std::int64_t backward_bytes(const TensorParallelAttention& layer, std::int64_t query_rows,
                            std::int64_t key_rows, std::int64_t rank, std::int64_t ranks) {
  constexpr std::int64_t kSum = 4;
  const auto all_reduced = [&](std::int64_t count) { return all_reduce_bytes(count, rank, ranks); };
  std::int64_t bytes = kSum * (ranks - 1) * query_rows * layer.own_options().num_heads * kHeadDim;
  bytes += all_reduced(query_rows * kEmbed) + all_reduced(key_rows * kEmbed);
  // Norms that every rank has; those of each head are cut as the heads are.
  const bool shared_norms = layer.options().qk_norm_span == QkNormSpan::kHead;
  if (layer.options().qk_norm && shared_norms) bytes += 2 * all_reduced(kHeadDim);
  const std::int64_t replicas = ranks / std::min(layer.num_kv_heads(), ranks);
  if (replicas > 1) {  // ranks with the same KV head
    for (const Parameter& parameter : layer.named_parameters()) {
      if (parameter.name[0] != 'k' && parameter.name[0] != 'v') continue;
      if (parameter.name == "k_norm.weight" && shared_norms) continue;
      bytes += replicas == ranks ? all_reduced(parameter.num_elements())
                                 : kSum * (replicas - 1) * parameter.num_elements();
    }
  }
  return bytes;
}

TEST_P(TensorParallel, GradientsAreThoseOfOneProcess) {
  for_each_layer([&](MultiHeadAttention whole, int ranks) {
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
      TensorParallelAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      const TrainingForward mine = layer.forward_training(own, inputs);
      EXPECT_TRUE(same_bits(mine.out, forward.out)) << describe(whole, ranks);
      communicator.reset_statistics();
      const InputGradients got = layer.backward(own, dout, mine.saved);
      EXPECT_EQ(communicator.statistics().bytes_sent,
                backward_bytes(layer, 2 * 21, 2 * 25, communicator.rank(), ranks));
      expect_near(got.query, expected.query, tolerance, "query");
      expect_near(got.key, expected.key, tolerance, "key");
      expect_gradients_near(layer, whole, tolerance, describe(whole, ranks));
    }));
  });
}

TEST_P(TensorParallel, TheNormIsThatOfTheWholeLayer) {
  for_each_layer([&](MultiHeadAttention whole, int ranks) {
    const Context one = context(1);
    const Tensor x = normal(whole.dtype(), {1, 12, kEmbed}, 1);
    const TrainingForward forward = whole.forward_training(one, {.query = x});
    whole.backward(one, x, forward.saved);
    const double expected = clip_gradients(one, whole.parameters(), 0.5);
    const double tolerance = whole.dtype() == DType::kBF16 ? 0.01 : 1e-5;
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      TensorParallelAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      EXPECT_EQ(error_of([&] { layer.clip_gradients(own, 0); }),
                "TensorParallelAttention::clip_gradients: max_norm: got 0, expected a positive "
                "number");
      const TrainingForward mine = layer.forward_training(own, {.query = x});
      layer.backward(own, x, mine.saved);
      EXPECT_NEAR(layer.clip_gradients(own, 0.5), expected, tolerance * expected)
          << describe(whole, ranks);
      EXPECT_NEAR(layer.clip_gradients(own, 0.5), 0.5, 1e-5);
    }));
  });
}

TEST(TensorParallelErrors, WhatDoesNotDivide) {
  expect_all_return(run_ranks(2, [](Communicator& communicator) {
    EXPECT_EQ(
        error_of([&] { TensorParallelAttention(communicator, {.embed_dim = 9, .num_heads = 3}); }),
        "TensorParallelAttention: num_heads: got 3 for 2 ranks, expected a multiple of the "
        "ranks");
    EXPECT_EQ(error_of([&] {
                TensorParallelAttention(communicator,
                                        {.embed_dim = 12, .num_heads = 6, .num_kv_heads = 3});
              }),
              "TensorParallelAttention: num_kv_heads: got 3 for 2 ranks, expected a multiple or a "
              "divisor of the ranks");
    EXPECT_EQ(error_of(
                  [&] {
                    TensorParallelAttention(communicator, {.embed_dim = 8,
                                                           .num_heads = 2,
                                                           .qk_norm = true,
                                                           .qk_norm_span = QkNormSpan::kAllHeads});
                  },
                  ErrorCode::kUnsupported),
              "TensorParallelAttention: qk_norm_span: got a norm over all heads, expected one over "
              "each head: ranks have some of the heads");
    TensorParallelAttention layer(communicator, {.embed_dim = 8, .num_heads = 2});
    const Tensor small(DType::kF32, {4, 8});
    EXPECT_EQ(error_of([&] { layer.set_whole_parameter(host_context(), "q_proj.weight", small); }),
              "TensorParallelAttention::set_whole_parameter: q_proj.weight: got [4, 8], expected "
              "the whole's [8, 8]");
  }));
}

TEST(TensorParallelErrors, ACacheIsAppendedOnAllRanksOrNone) {
  expect_all_return(run_ranks(2, [](Communicator& communicator) {
    const Context& own = host_context();
    TensorParallelAttention layer(communicator, {.embed_dim = 8, .num_heads = 2, .causal = true});
    KvCache cache = KvCache::contiguous(own, layer.cache_options());
    const Tensor x(DType::kF32, {1, 3, 8});
    layer.forward(own, x, cache);
    EXPECT_EQ(cache.length(0), 3);
    // Rank 1 brings another number of tokens.
    const Tensor other(DType::kF32, {1, communicator.rank() == 0 ? 1 : 2, 8});
    const std::string message =
        error_of([&] { layer.forward(own, other, cache); }, ErrorCode::kCommunication);
    EXPECT_NE(message.find("ranks disagree: x: f32 [1, 1, 8] on rank 0, f32 [1, 2, 8] on rank 1"),
              std::string::npos)
        << message;
    EXPECT_EQ(cache.length(0), 3);
    // Rank 1 cannot take the call at all.
    Tensor narrow(communicator.rank() == 0 ? DType::kF32 : DType::kF16, {1, 1, 8});
    error_of([&] { layer.forward(own, narrow, cache); },
             communicator.rank() == 0 ? ErrorCode::kCommunication : ErrorCode::kInvalidArgument);
    EXPECT_EQ(cache.length(0), 3);
    layer.forward(own, x, cache);
    EXPECT_EQ(cache.length(0), 6);
  }));
}

}  // namespace
}  // namespace ladon::test
