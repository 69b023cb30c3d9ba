// Promise 6 on a GPU: the same bits in every run, and for any batch mates.
#include <gtest/gtest.h>

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "cache/cache_support.h"
#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"

namespace ladon::test {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};
const int kRepetitions = repetitions(200);

struct Shape {
  std::int64_t batch, query_len, kv_len, heads, kv_heads, dim;
};
// Prefill, decoding of one sequence and of many, keys past several splits, an odd head.
constexpr Shape kShapes[] = {{2, 333, 333, 8, 2, 64},
                             {1, 1, 5000, 8, 1, 128},
                             {16, 1, 1100, 8, 8, 64},
                             {1, 70, 2100, 3, 3, 33}};

/// Forward and backward of one problem, its inputs made once.
struct RepeatedCase {
  RepeatedCase(const Context& context, const Shape& shape, DType dtype) : context_(context) {
    const auto make = [&](const Dims& dims, std::uint64_t seed) {
      Tensor tensor(context, dtype, dims);
      fill_normal(context, tensor, 0, 1, seed);
      return tensor;
    };
    const auto& [batch, query_len, kv_len, heads, kv_heads, dim] = shape;
    q = make({batch, query_len, heads, dim}, 1);
    k = make({batch, kv_len, kv_heads, dim}, 2);
    v = make({batch, kv_len, kv_heads, dim}, 3);
    dout = make({batch, query_len, heads, dim}, 4);
    bias = make({1, heads, 1, kv_len}, 5);
    sinks = make({heads}, 6);
  }

  /// out, lse, dq, dk, dv, dbias and dsinks.
  std::vector<Tensor> results() const {
    AttentionOptions options{.causal = true, .bias = bias, .sinks = sinks};
    std::vector<Tensor> all;
    all.emplace_back(context_, q.dtype(), q.shape());
    all.emplace_back(context_, DType::kF32, Dims{q.size(0), q.size(2), q.size(1)});
    for (const Tensor* input : {&q, &k, &v}) {
      all.emplace_back(context_, input->dtype(), input->shape());
    }
    for (const Tensor* input : {&bias, &sinks}) {
      all.emplace_back(context_, DType::kF32, input->shape());
    }
    attention(context_, q, k, v, options, all[0], all[1]);
    attention_backward(
        context_, q, k, v, options, {.out = all[0], .lse = all[1], .dout = dout},
        {.dq = all[2], .dk = all[3], .dv = all[4], .dbias = all[5], .dsinks = all[6]});
    return all;
  }

  const Context& context_;
  Tensor q, k, v, dout, bias, sinks;
};

/// Keeps the GPU busy with other work while it lives, so that blocks do not run in their usual
/// order.
class Disturbance {
 public:
  Disturbance()
      : thread_([this] {
          const Context context = cuda_context();
          const RepeatedCase run(context, {3, 200, 200, 4, 4, 64}, DType::kF32);
          while (!stop_) {
            for (int i = 0; i < 20; ++i) run.results();
            context.synchronize();
          }
        }) {}
  ~Disturbance() {
    stop_ = true;
    thread_.join();
  }
  Disturbance(const Disturbance&) = delete;
  Disturbance& operator=(const Disturbance&) = delete;

 private:
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

class CudaRepeat : public CudaTest {};

TEST_F(CudaRepeat, P6_AttentionAndItsGradients) {
  const Disturbance disturbance;
  for (const Shape& shape : kShapes) {
    for (const DType dtype : kFloats) {
      const RepeatedCase run(context(), shape, dtype);
      const std::vector<Tensor> expected = run.results();
      for (int i = 1; i < kRepetitions; ++i) {
        const std::vector<Tensor> results = run.results();
        for (std::size_t n = 0; n < results.size(); ++n) {
          ASSERT_TRUE(same_bits(results[n], expected[n]))
              << name_of(dtype) << " query_len " << shape.query_len << ", run " << i << ", result "
              << n;
        }
      }
    }
  }
}

MultiHeadAttention layer_of(const Context& context, DType dtype) {
  MultiHeadAttention layer({.embed_dim = 96,
                            .num_heads = 6,
                            .num_kv_heads = 2,
                            .head_dim = 40,
                            .query_bias = true,
                            .out_bias = true,
                            .causal = true,
                            .rope = RopeOptions{},
                            .qk_norm = true,
                            .sinks = true,
                            .dtype = dtype},
                           3);
  layer.to(context);
  return layer;
}

TEST_F(CudaRepeat, P6_LayersAndTheirGradients) {
  const Disturbance disturbance;
  for (const DType dtype : kFloats) {
    MultiHeadAttention layer = layer_of(context(), dtype);
    const Tensor x = normal(dtype, {3, 150, 96}, 1);
    const Tensor grad = normal(dtype, {3, 150, 96}, 2);
    std::vector<Tensor> expected;
    for (int i = 0; i < kRepetitions; ++i) {
      layer.zero_grad(context());
      TrainingForward forward = layer.forward_training(context(), {.query = x});
      InputGradients gradients = layer.backward(context(), grad, forward.saved);
      std::vector<Tensor> results;
      results.push_back(std::move(forward.out));
      results.push_back(std::move(gradients.query));
      for (const Parameter& parameter : layer.named_parameters()) {
        results.push_back(parameter.gradient.clone());
      }
      if (expected.empty()) expected = std::move(results);
      for (std::size_t n = 0; n < results.size(); ++n) {
        ASSERT_TRUE(same_bits(results[n], expected[n])) << name_of(dtype) << ", run " << i;
      }
    }
  }
}

TEST_F(CudaRepeat, P6_AttentionAmongBatchMates) {
  for (const Shape& shape : kShapes) {
    for (const DType dtype : kFloats) {
      const RepeatedCase alone(
          context(), {1, shape.query_len, shape.kv_len, shape.heads, shape.kv_heads, shape.dim},
          dtype);
      for (const std::int64_t batch : {2, 7, 64}) {
        const std::int64_t place = batch / 2;
        RepeatedCase among(
            context(),
            {batch, shape.query_len, shape.kv_len, shape.heads, shape.kv_heads, shape.dim}, dtype);
        const auto put = [&](const Tensor& from, Tensor& to) {
          copy(context(), from, to.view().slice(0, place, place + 1));
        };
        put(alone.q, among.q);
        put(alone.k, among.k);
        put(alone.v, among.v);
        put(alone.dout, among.dout);
        const std::vector<Tensor> expected = alone.results();
        const std::vector<Tensor> results = among.results();
        for (const std::size_t n : {0U, 1U, 2U, 3U, 4U}) {
          const Tensor own =
              Tensor::copy_of(context(), results[n].view().slice(0, place, place + 1));
          EXPECT_TRUE(same_bits(own, expected[n]))
              << name_of(dtype) << " query_len " << shape.query_len << " among " << batch
              << ", result " << n;
        }
      }
    }
  }
}

TEST_F(CudaRepeat, P6_DecodingAmongSequencesOfOtherLengths) {
  for (const DType dtype : kFloats) {
    const MultiHeadAttention layer = layer_of(context(), dtype);
    constexpr std::int64_t kBatch = 64;
    constexpr std::int64_t kLongest = 700;
    const Tensor prompts = normal(dtype, {kBatch, kLongest, 96}, 1);
    const Tensor tokens = normal(dtype, {kBatch, 5, 96}, 2);
    for (const CacheKind& kind : {CacheKind{"contiguous"}, CacheKind{"paged", 16}}) {
      std::vector<std::int64_t> lengths;
      for (std::int64_t b = 0; b < kBatch; ++b) lengths.push_back((b * 97 + 1) % kLongest);
      KvCache all = make_cache(context(), kind, layer.cache_options(kBatch), kBatch * 1000);
      const Tensor prompt_out =
          layer.forward(context(), prompts, all, CachedCall{.new_lengths = lengths});
      std::vector<Tensor> steps;
      for (std::int64_t t = 0; t < 5; ++t) {
        steps.push_back(layer.forward(context(), tokens.view().slice(1, t, t + 1), all));
      }
      for (const std::int64_t b : {0, 1, 40, 63}) {
        const std::int64_t length = lengths[static_cast<std::size_t>(b)];
        const auto own = [&](const Tensor& tensor) { return tensor.view().slice(0, b, b + 1); };
        KvCache single = make_cache(context(), kind, layer.cache_options(1), 1000);
        const std::string where = std::string(name_of(dtype)) + " " + kind.name + " sequence " +
                                  std::to_string(b) + " of " + std::to_string(length);
        const Tensor alone = layer.forward(context(), own(prompts).slice(1, 0, length), single);
        EXPECT_TRUE(
            same_bits(alone, Tensor::copy_of(context(), own(prompt_out).slice(1, 0, length))))
            << where;
        for (std::int64_t t = 0; t < 5; ++t) {
          const Tensor token = layer.forward(context(), own(tokens).slice(1, t, t + 1), single);
          EXPECT_TRUE(
              same_bits(token, Tensor::copy_of(context(), own(steps[static_cast<std::size_t>(t)]))))
              << where << ", token " << t;
        }
      }
    }
  }
}

/// One sequence and many run different kernels.
TEST_F(CudaRepeat, P6_DecodingAloneAndAmongMany) {
  constexpr std::int64_t kBatch = 80;
  constexpr std::int64_t kLength = 1100;
  constexpr std::int64_t kKvHeads = 4;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const std::int64_t dim : {128, 80}) {
      const Tensor q = normal(dtype, {kBatch, 1, 2 * kKvHeads, dim}, 1);
      const Tensor k = normal(dtype, {kBatch, kLength, kKvHeads, dim}, 2);
      const Tensor v = normal(dtype, {kBatch, kLength, kKvHeads, dim}, 3);
      for (const DType storage : {dtype, DType::kI8, DType::kF8E4M3}) {
        const auto decode = [&](const CacheKind& kind, std::int64_t begin, std::int64_t end) {
          const auto own = [&](const Tensor& tensor) { return tensor.view().slice(0, begin, end); };
          const KvCacheOptions options{
              .batch = end - begin, .num_kv_heads = kKvHeads, .head_dim = dim, .format = storage};
          KvCache cache = make_cache(context(), kind, options, options.batch * kLength);
          cache.append(context(), own(k), own(v));
          Tensor out(context(), dtype, {options.batch, 1, 2 * kKvHeads, dim});
          attention(context(), own(q), cache.view(), {.causal = true}, out);
          return out;
        };
        const Tensor all = decode({"paged", 16}, 0, kBatch);
        for (const std::int64_t b : {0, 41, 79}) {
          EXPECT_TRUE(same_bits(decode({"contiguous"}, b, b + 1),
                                Tensor::copy_of(context(), all.view().slice(0, b, b + 1))))
              << name_of(dtype) << " in " << name_of(storage) << ", dim " << dim << ", sequence "
              << b;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
