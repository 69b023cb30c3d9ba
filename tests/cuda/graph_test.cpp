// Graph: a step that is gathered and enqueued at once gives the bits of plain calls.
#include "ladon/graph.h"

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache_support.h"
#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/optim.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kBatch = 3;
constexpr std::int64_t kPrompt = 500;  // the first split of keys ends soon after

class CudaGraphs : public CudaTest {
 protected:
  Tensor tokens(const AttentionLayer& layer, std::int64_t count, std::uint64_t seed) const {
    return normal(layer.dtype(), {kBatch, count, layer.embed_dim()}, seed);
  }

  /// How many tokens are decoded, and how often the caches are forked in between.
  struct Run {
    int steps = 60;
    int fork_every = 20;
  };

  /// Tokens one by one, plainly over one cache and by a Graph over another, with forks of both in
  /// between.
  void expect_same_bits(const AttentionLayer& layer, const CacheKind& kind, const Run& run) {
    KvCache plain = make_cache(context(), kind, layer.cache_options(kBatch), 8192);
    KvCache graphed = make_cache(context(), kind, layer.cache_options(kBatch), 8192);
    const Tensor prompt = tokens(layer, kPrompt, 1);
    layer.forward(context(), prompt, plain);
    layer.forward(context(), prompt, graphed);
    Graph graph(context());
    for (int i = 0; i < run.steps; ++i) {
      const Tensor x = tokens(layer, 1, static_cast<std::uint64_t>(100 + i));
      const Tensor expected = layer.forward(context(), x, plain);
      Tensor out;
      graph.run([&] { out = layer.forward(context(), x, graphed); });
      ASSERT_TRUE(same_bits(out, expected)) << kind.name << " step " << i;
      if (i % run.fork_every == run.fork_every - 1) {
        plain = plain.fork(context());
        graphed = graphed.fork(context());
      }
    }
    EXPECT_GT(graph.statistics().num_nodes, 4);
    EXPECT_LT(graph.statistics().num_changed, graph.statistics().num_nodes) << kind.name;
    // Two in turn, and again where another split of keys needs another kernel, or a fork copies
    // what it shares.
    EXPECT_LE(graph.statistics().num_built, 6 + 4 * (run.steps / run.fork_every)) << kind.name;
  }
};

TEST_F(CudaGraphs, ManyHeads) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    MultiHeadAttention layer({.embed_dim = 256,
                              .num_heads = 4,
                              .num_kv_heads = 2,
                              .causal = true,
                              .rope = RopeOptions{},
                              .dtype = dtype});
    layer.to(context());
    expect_same_bits(layer, {"contiguous"}, {});
    expect_same_bits(layer, {"paged", 16}, {});
  }
}

TEST_F(CudaGraphs, AThousandTokens) {
  MultiHeadAttention layer({.embed_dim = 256,
                            .num_heads = 4,
                            .num_kv_heads = 2,
                            .causal = true,
                            .rope = RopeOptions{},
                            .qk_norm = true,
                            .dtype = DType::kBF16});
  layer.to(context());
  for (const CacheKind& kind : {CacheKind{"contiguous"}, CacheKind{"paged", 16}}) {
    expect_same_bits(layer, kind, {.steps = 1000, .fork_every = 150});
  }
}

TEST_F(CudaGraphs, SeveralLayersSendTheirListsOnce) {
  std::vector<MultiHeadAttention> layers;
  std::vector<KvCache> caches;
  for (int i = 0; i < 4; ++i) {
    layers.push_back(MultiHeadAttention(
        {.embed_dim = 128, .num_heads = 2, .causal = true, .dtype = DType::kBF16}));
    layers.back().to(context());
    caches.push_back(make_cache(context(), {"paged", 16}, layers[0].cache_options(1), 1024));
  }
  const Tensor x = normal(DType::kBF16, {1, 1, 128}, 1);
  const auto nodes_of = [&](std::size_t count) {
    Graph graph(context());
    graph.run([&] {
      for (std::size_t i = 0; i < count; ++i) layers[i].forward(context(), x, caches[i]);
    });
    return graph.statistics().num_nodes;
  };
  const std::int64_t two = nodes_of(2);
  for (std::size_t i = 2; i < 4; ++i) layers[i].forward(context(), x, caches[i]);
  const std::int64_t four = nodes_of(4);
  // One list goes to the device, however many layers read it.
  EXPECT_EQ((four - 1) % 4, 0) << two << " " << four;
  EXPECT_EQ((four - 1) / 2, two - 1) << two << " " << four;
}

TEST_F(CudaGraphs, OfTraining) {
  const MultiHeadAttentionOptions options{.embed_dim = 64, .num_heads = 2, .causal = true};
  MultiHeadAttention plain(options, 3);
  MultiHeadAttention graphed(options, 3);
  plain.to(context());
  graphed.to(context());
  const Tensor x = normal(DType::kF32, {2, 33, 64}, 1);
  AdamW plain_optimiser(context(), plain.parameters(), {});
  AdamW graphed_optimiser(context(), graphed.parameters(), {});
  const auto step = [&](MultiHeadAttention& layer, AdamW& optimiser) {
    layer.zero_grad(context());
    const auto pass = layer.forward_training(context(), {.query = x});
    layer.backward(context(), pass.out, pass.saved);
    optimiser.step(context());
  };
  Graph graph(context());
  for (int i = 0; i < 5; ++i) {
    step(plain, plain_optimiser);
    graph.run([&] { step(graphed, graphed_optimiser); });
  }
  EXPECT_TRUE(same_bits(plain.forward(context(), x), graphed.forward(context(), x)));
}

TEST_F(CudaGraphs, RefuseToWait) {
  const Tensor x = normal(DType::kF32, {1, 5, 2, 8}, 1);
  Graph graph(context());
  Tensor out;
  const auto run_and = [&](const std::function<void()>& wait) {
    return error_of([&] {
      graph.run([&] {
        out = attention(context(), x, x, x);
        wait();
      });
    });
  };
  const Tensor expected = attention(context(), x, x, x);
  for (const std::function<void()>& wait : {std::function<void()>([&] { context().synchronize(); }),
                                            {[&] { out.to_host(); }},
                                            {[&] { x.to_host().to(context()); }}}) {
    const std::string error = run_and(wait);
    EXPECT_NE(
        error.find("got a call that waits for the device, expected none while a Graph records"),
        std::string::npos)
        << error;
    // What was called before has happened, and the Context goes on.
    EXPECT_TRUE(same_bits(out, expected));
  }
}

TEST_F(CudaGraphs, RefuseOtherThreadsAndEachOther) {
  const Tensor x = normal(DType::kF32, {1, 5, 2, 8}, 1);
  Graph graph(context());
  Graph other(context());
  std::string error;
  graph.run([&] {
    std::thread([&] { error = error_of([&] { attention(context(), x, x, x); }); }).join();
  });
  EXPECT_NE(error.find("got a call from another thread"), std::string::npos) << error;
  for (Graph* const inner : {&other, &graph}) {
    Tensor out;
    error = error_of([&] {
      graph.run([&] {
        out = attention(context(), x, x, x);
        inner->run([] {});
      });
    });
    EXPECT_NE(error.find("a Graph records already"), std::string::npos) << error;
    EXPECT_TRUE(same_bits(out, attention(context(), x, x, x)));  // what was gathered before is done
  }
  EXPECT_NE(error_of([&] { graph.run({}); }).find("step: got none"), std::string::npos);
}

TEST_F(CudaGraphs, AStepThatThrowsPassesItOn) {
  Graph graph(context());
  EXPECT_THROW(graph.run([] { throw std::runtime_error("mine"); }), std::runtime_error);
  const Tensor x = normal(DType::kF32, {1, 5, 2, 8}, 1);
  Tensor out;
  graph.run([&] { out = attention(context(), x, x, x); });
  EXPECT_TRUE(same_bits(out, attention(context(), x, x, x)));
}

TEST_F(CudaGraphs, OneKernelWithSeveralSizesOfSharedMemory) {
  const auto qkv = [&](std::int64_t head_dim) {
    return normal(DType::kBF16, {1, 100, 2, head_dim}, 1);
  };
  const Tensor large = qkv(576);
  const Tensor small = qkv(192);
  const Tensor expected[] = {attention(context(), large, large, large),
                             attention(context(), small, small, small)};
  Graph graph(context());
  for (int i = 0; i < 4; ++i) {
    Tensor outs[2];
    graph.run([&] {
      outs[0] = attention(context(), large, large, large);
      outs[1] = attention(context(), small, small, small);
    });
    EXPECT_TRUE(same_bits(outs[0], expected[0]));
    EXPECT_TRUE(same_bits(outs[1], expected[1]));
  }
  EXPECT_EQ(graph.statistics().num_built, 2);
}

TEST_F(CudaGraphs, StreamsThatAreCapturedAreRefused) {
  cudaStream_t stream = nullptr;
  ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
  {
    const Context borrowed(ContextOptions{.device = Device::kCuda, .stream = stream});
    const Tensor x = normal(DType::kF32, {1, 5, 2, 8}, 1);
    context().synchronize();                    // x is made on another stream
    Tensor out = attention(borrowed, x, x, x);  // takes its memory
    borrowed.synchronize();
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed), cudaSuccess);
    const std::string error =
        error_of([&] { attention(borrowed, x, x, x, {}, out.view()); });  // the same call again
    cudaGraph_t captured = nullptr;
    cudaStreamEndCapture(stream, &captured);
    if (captured != nullptr) cudaGraphDestroy(captured);
    EXPECT_NE(error.find("ladon::Graph records such calls"), std::string::npos) << error;
    EXPECT_TRUE(same_bits(attention(borrowed, x, x, x), out));
  }
  EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
}

}  // namespace
}  // namespace ladon::test
