// Hopper's kernels give the bits of the generic ones: for every length, head and window, and where
// keys or values that a row does not see are NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "cuda/hopper_kernels.h"
#include "ladon/attention.h"
#include "ladon/multi_head_attention.h"
#include "support/error_of.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

class CudaHopper : public HopperKernelsTest {};

/// Calls that Hopper's kernels take, or nearly.
Case random_plain_case(Random& random) {
  const auto pick = [&](std::int64_t low, std::int64_t high) {
    return low + random.below(high - low + 1);
  };
  constexpr std::int64_t kGroups[] = {1, 2, 3, 4, 8};
  constexpr std::int64_t kDims[] = {64, 128, 8, 40, 120, 96, 72, 33, 192, 136, 160, 200, 256};
  constexpr std::int64_t kLastDim = std::size(kDims) - 1;
  Case c;
  c.batch = pick(1, 3);
  c.query_len = pick(1, 10) > 3 ? pick(64, 420) : pick(1, 64);
  c.kv_len = pick(1, 4) == 1 ? c.query_len : pick(1, 1400);
  c.num_kv_heads = pick(1, 2);
  c.num_heads = c.num_kv_heads * kGroups[pick(0, 4)];
  c.head_dim = kDims[pick(0, kLastDim)];
  c.value_dim = pick(1, 4) == 1 ? kDims[pick(0, kLastDim)] : c.head_dim;
  if (pick(1, 4) == 1) c.value_dim = std::min<std::int64_t>(c.value_dim, 128);
  c.dtype = c.kv_dtype = pick(0, 1) == 0 ? DType::kBF16 : DType::kF16;
  c.causal = pick(0, 1) == 0;
  c.alignment = pick(0, 1) == 0 ? Alignment::kBottomRight : Alignment::kTopLeft;
  if (pick(0, 2) == 0) c.window_left = pick(0, 600);
  if (!c.causal && pick(0, 3) == 0) c.window_right = pick(0, 300);
  c.lengths = static_cast<Lengths>(pick(0, 2));
  c.sinks = pick(0, 3) == 0;
  c.memory = pick(0, 2) == 0 ? Memory::kHeadsFirst : Memory::kDense;
  c.seed = static_cast<std::uint64_t>(pick(1, 1 << 20));
  return c;
}

TEST_F(CudaHopper, SameBitsAsTheGenericKernels) {
  for (int i = 0; i < repetitions(600); ++i) {
    Random random(7, static_cast<std::uint64_t>(i));
    const CaseData data(random_plain_case(random));
    const CaseResults fast = run(*hopper_, data);
    const CaseResults expected = run(*generic_, data);
    ASSERT_TRUE(same_bits(fast, expected)) << i << ": " << data.problem().describe();
  }
}

TEST_F(CudaHopper, WithinTheBound) {
  for (int i = 0; i < repetitions(12); ++i) {
    Random random(8, static_cast<std::uint64_t>(i));
    Case problem = random_plain_case(random);
    problem.batch = 1;  // the reference takes its time
    problem.num_heads = problem.num_heads / problem.num_kv_heads;
    problem.num_kv_heads = 1;
    const CaseData data(problem);
    EXPECT_EQ(check_case(*hopper_, data, truth_of(data)), "") << data.problem().describe();
  }
}

/// The gradients of q, k and v.
std::vector<Tensor> gradients_of(const Context& context, const Tensor& q, const Tensor& k,
                                 const Tensor& v, const Tensor& dout,
                                 const AttentionOptions& options) {
  Tensor out(context, q.dtype(), dout.shape());
  Tensor lse(context, DType::kF32, {q.size(0), q.size(2), q.size(1)});
  attention(context, q, k, v, options, out, lse);
  std::vector<Tensor> gradients;
  for (const Tensor* like : {&q, &k, &v}) {
    gradients.emplace_back(context, like->dtype(), like->shape());
  }
  attention_backward(context, q, k, v, options, {.out = out, .lse = lse, .dout = dout},
                     {.dq = gradients[0], .dk = gradients[1], .dv = gradients[2]});
  return gradients;
}
bool all_same_bits(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(),
                    [](const Tensor& x, const Tensor& y) { return same_bits(x, y); });
}

TEST_F(CudaHopper, LongSequencesHaveTheSameBits) {
  constexpr std::int64_t kLength = 5000;
  struct Dim {
    std::int64_t head;
    std::int64_t value;
  };
  for (const auto [dim, value_dim] : {Dim{64, 64}, Dim{128, 128}, Dim{192, 128}, Dim{256, 256}}) {
    const Tensor q = normal(DType::kBF16, {2, kLength, 8, dim}, 1, 3);
    const Tensor k = normal(DType::kBF16, {2, kLength, 2, dim}, 2, 3);
    const Tensor v = normal(DType::kBF16, {2, kLength, 2, value_dim}, 3);
    const Tensor dout = normal(DType::kBF16, {2, kLength, 8, value_dim}, 4);
    for (const AttentionOptions& options :
         {AttentionOptions{}, AttentionOptions{.causal = true},
          AttentionOptions{.causal = true, .window_left = 1000}}) {
      context().synchronize();
      const Tensor fast = attention(*hopper_, q, k, v, options);
      const Tensor expected = attention(*generic_, q, k, v, options);
      EXPECT_TRUE(same_bits(fast, expected)) << dim;
      EXPECT_TRUE(all_same_bits(gradients_of(*hopper_, q, k, v, dout, options),
                                gradients_of(*generic_, q, k, v, dout, options)))
          << dim;
    }
  }
}

/// Results go into the columns from `first` on of heads that are wider; the rest stays as it was.
TEST_F(CudaHopper, OutputsOfEveryWidthAndNothingAroundThem) {
  constexpr std::int64_t kLength = 200;
  constexpr std::int64_t kHeads = 3;
  constexpr std::int64_t kAround = 8;
  const AttentionOptions options{.causal = true};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const Tensor q = normal(dtype, {1, kLength, kHeads, 256}, 1);
    const Tensor k = normal(dtype, {1, kLength, kHeads, 256}, 2);
    const Tensor v = normal(dtype, {1, kLength, kHeads, 256}, 3);
    context().synchronize();
    for (const std::int64_t dim :
         {1,  2,  7,  8,  9,   16,  17,  24,  31,  32,  33,  40,  56,  63,  64,  65, 72,
          80, 88, 96, 97, 104, 112, 120, 121, 127, 128, 129, 136, 192, 199, 255, 256}) {
      for (const std::int64_t first : {std::int64_t{8}, std::int64_t{3}}) {
        for (const std::int64_t head_dim :
             {std::int64_t{24}, std::int64_t{128}, std::int64_t{160}, std::int64_t{200}}) {
          const auto run_on = [&](const Context& where) {
            Tensor wide = normal(dtype, {1, kLength, kHeads, dim + 2 * kAround}, 4);
            context().synchronize();
            attention(where, q.view().slice(3, 0, head_dim), k.view().slice(3, 0, head_dim),
                      v.view().slice(3, 0, dim), options, wide.view().slice(3, first, first + dim));
            where.synchronize();
            return wide.to_host();
          };
          const Tensor before = normal(dtype, {1, kLength, kHeads, dim + 2 * kAround}, 4).to_host();
          const Tensor fast = run_on(*hopper_);
          const auto place = " columns " + std::to_string(dim) + " from " + std::to_string(first) +
                             ", heads of " + std::to_string(head_dim) + ", " + name_of(dtype);
          ASSERT_TRUE(same_bits(fast, run_on(*generic_))) << place;
          const Context host;
          const auto part = [&](const Tensor& tensor, std::int64_t begin, std::int64_t end) {
            return Tensor::copy_of(host, tensor.view().slice(3, begin, end));
          };
          ASSERT_TRUE(same_bits(part(fast, 0, first), part(before, 0, first))) << place;
          ASSERT_TRUE(same_bits(part(fast, first + dim, dim + 2 * kAround),
                                part(before, first + dim, dim + 2 * kAround)))
              << place;
        }
      }
    }
  }
}

TEST_F(CudaHopper, SameBitsEveryTime) {
  for (const std::int64_t dim : {128, 192}) {
    const Tensor q = normal(DType::kBF16, {2, 1500, 12, dim}, 1);
    const Tensor k = normal(DType::kBF16, {2, 1500, 4, dim}, 2);
    const Tensor v = normal(DType::kBF16, {2, 1500, 4, 128}, 3);
    const Tensor dout = normal(DType::kBF16, {2, 1500, 12, 128}, 4);
    context().synchronize();
    const Tensor first = attention(*hopper_, q, k, v, {.causal = true});
    const std::vector<Tensor> gradients = gradients_of(*hopper_, q, k, v, dout, {.causal = true});
    for (int i = 0; i < repetitions(200); ++i) {
      ASSERT_TRUE(same_bits(attention(*hopper_, q, k, v, {.causal = true}), first)) << dim << i;
      ASSERT_TRUE(all_same_bits(gradients_of(*hopper_, q, k, v, dout, {.causal = true}), gradients))
          << dim << " " << i;
    }
  }
}

TEST_F(CudaHopper, InfinityAndNanReachTheRowsThatSeeThem) {
  constexpr std::int64_t kLength = 700;
  const Tensor q = normal(DType::kBF16, {1, kLength, 4, 64}, 1);
  const Tensor k = normal(DType::kBF16, {1, kLength, 2, 64}, 2);
  const Tensor v = normal(DType::kBF16, {1, kLength, 2, 64}, 3);
  const Tensor dout = normal(DType::kBF16, {1, kLength, 4, 64}, 4);
  const AttentionOptions options{.causal = true};
  const auto expect_same_gradients = [&](const Tensor& queries, const Tensor& keys,
                                         const Tensor& values, const Tensor& gradient) {
    EXPECT_TRUE(all_same_bits(gradients_of(*hopper_, queries, keys, values, gradient, options),
                              gradients_of(*generic_, queries, keys, values, gradient, options)));
  };
  for (const float value :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(), -1e38F}) {
    for (const std::int64_t token : {std::int64_t{0}, std::int64_t{300}, kLength - 1}) {
      const Tensor keys = with_token(context(), k, token, value);
      EXPECT_TRUE(same_bits(attention(*hopper_, q, keys, v, options),
                            attention(*generic_, q, keys, v, options)))
          << "key " << token << " of " << value;
      const Tensor values = with_token(context(), v, token, value);
      EXPECT_TRUE(same_bits(attention(*hopper_, q, k, values, options),
                            attention(*generic_, q, k, values, options)))
          << "value " << token << " of " << value;
      SCOPED_TRACE("token " + std::to_string(token) + " of " + std::to_string(value));
      expect_same_gradients(q, keys, v, dout);
      expect_same_gradients(q, k, values, dout);
      expect_same_gradients(with_token(context(), q, token, value), k, v, dout);
      expect_same_gradients(q, k, v, with_token(context(), dout, token, value));
    }
  }
}

/// Their tiles are computed again by another kernel than those of short heads.
TEST_F(CudaHopper, InfinityAndNanInLongHeads) {
  constexpr std::int64_t kLength = 300;
  for (const std::int64_t dim : {192, 256}) {
    const std::int64_t value_dim = dim == 192 ? 128 : dim;
    const Tensor q = normal(DType::kBF16, {1, kLength, 4, dim}, 1);
    const Tensor k = normal(DType::kBF16, {1, kLength, 2, dim}, 2);
    const Tensor v = normal(DType::kBF16, {1, kLength, 2, value_dim}, 3);
    const Tensor dout = normal(DType::kBF16, {1, kLength, 4, value_dim}, 4);
    for (const float value :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
      for (const std::int64_t token : {std::int64_t{0}, std::int64_t{130}, kLength - 1}) {
        const auto expect_same_gradients = [&](const Tensor& queries, const Tensor& keys,
                                               const Tensor& values, const Tensor& gradient) {
          const AttentionOptions options{.causal = true};
          EXPECT_TRUE(
              all_same_bits(gradients_of(*hopper_, queries, keys, values, gradient, options),
                            gradients_of(*generic_, queries, keys, values, gradient, options)))
              << "token " << token << " of " << value << ", heads of " << dim;
        };
        expect_same_gradients(with_token(context(), q, token, value), k, v, dout);
        expect_same_gradients(q, with_token(context(), k, token, value), v, dout);
        expect_same_gradients(q, k, with_token(context(), v, token, value), dout);
        expect_same_gradients(q, k, v, with_token(context(), dout, token, value));
        const Tensor keys = with_token(context(), k, token, value);
        const Tensor values = with_token(context(), v, token, value);
        EXPECT_TRUE(same_bits(attention(*hopper_, q, keys, values, {.causal = true}),
                              attention(*generic_, q, keys, values, {.causal = true})))
            << "token " << token << " of " << value << ", heads of " << dim;
        EXPECT_TRUE(same_bits(attention(*hopper_, q, k, values, {.causal = true}),
                              attention(*generic_, q, k, values, {.causal = true})))
            << "value " << token << " of " << value << ", heads of " << dim;
      }
    }
  }
}

/// Scores that grow from key to key raise the rows' maxima again and again: in the first block of
/// keys that products take together, in the second, and where a segment starts.
TEST_F(CudaHopper, GrowingScoresHaveTheSameBits) {
  constexpr std::int64_t kLength = 4400;
  const Context host;
  for (const std::int64_t dim : {64, 128, 192, 256}) {
    const Tensor q = normal(DType::kBF16, {1, 300, 2, dim}, 1, 3);
    Tensor k(DType::kF32, {1, kLength, 1, dim});
    const Tensor random = normal(DType::kF32, {1, kLength, 1, dim}, 2).to_host();
    for (std::int64_t i = 0; i < k.num_elements(); ++i) {
      const auto key = static_cast<float>(i / dim);
      k.data_as<float>()[i] = random.data_as<float>()[i] * (0.1F + key / 500);
    }
    Tensor rounded(DType::kBF16, k.shape());
    copy(host, k, rounded);
    const Tensor keys = rounded.to(context());
    const Tensor v = normal(DType::kBF16, {1, kLength, 1, dim == 192 ? 128 : dim}, 3);
    context().synchronize();
    EXPECT_TRUE(
        same_bits(attention(*hopper_, q, keys, v, {}), attention(*generic_, q, keys, v, {})))
        << dim;
  }
}

/// Projections and their gradients, large enough for Hopper's products.
TEST_F(CudaHopper, LayersHaveTheSameBits) {
  constexpr std::int64_t kEmbed = 1544;
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const MultiHeadAttention layer({.embed_dim = kEmbed,
                                    .num_heads = 12,
                                    .num_kv_heads = 12,
                                    .head_dim = 128,
                                    .query_bias = true,
                                    .out_bias = true,
                                    .causal = true,
                                    .dtype = dtype},
                                   5);
    const Tensor x = normal(dtype, {3, 450, kEmbed}, 1);
    const Tensor grad = normal(dtype, {3, 450, kEmbed}, 2);
    context().synchronize();
    std::vector<std::vector<Tensor>> results;
    for (const Context* where : {&*hopper_, &*generic_}) {
      MultiHeadAttention trained = layer;
      trained.to(*where);
      const TrainingForward forward = trained.forward_training(*where, {.query = x});
      std::vector<Tensor> all;
      all.push_back(trained.backward(*where, grad, forward.saved).query);
      all.push_back(forward.out.to_host());
      for (const Parameter& parameter : trained.named_parameters()) {
        all.push_back(parameter.gradient.to_host());
      }
      results.push_back(std::move(all));
    }
    EXPECT_TRUE(all_same_bits(results[0], results[1])) << name_of(dtype);
  }
}

TEST_F(CudaHopper, AnUnknownNameIsRefused) {
  setenv(kKernelsVariable, "fastest", 1);
  EXPECT_EQ(error_of([] { cuda_context(); }),
            "Context: LADON_CUDA_KERNELS: got 'fastest', expected generic or hopper");
  unsetenv(kKernelsVariable);
}

}  // namespace
}  // namespace ladon::test
