// Segments of keys are longer for heads of 129 to 256 columns (segment_size.cuh). How a token was
// fed, which kernel ran and how many of the heads a call has must not matter there either.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "cache/cache_support.h"
#include "cuda/hopper_kernels.h"
#include "ladon/attention.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kLength = 4200;  // past two of the longest segments
constexpr std::int64_t kHeads = 4;

struct HeadDims {
  std::int64_t head;
  std::int64_t value;

  std::string describe() const { return std::to_string(head) + "/" + std::to_string(value); }
};

class CudaSegments : public CudaTest {};
class CudaHopperSegments : public HopperKernelsTest {};

/// Chunks end on either side of 512 and 2048 keys, and around them tokens are fed one by one.
TEST_F(CudaSegments, P10_LongHeads) {
  const AttentionOptions options{.causal = true};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const HeadDims& dims :
         {HeadDims{192, 128}, HeadDims{129, 40}, HeadDims{256, 256}, HeadDims{64, 256}}) {
      const Tensor q = normal(dtype, {1, kLength, kHeads, dims.head}, 1);
      const Tensor k = normal(dtype, {1, kLength, kHeads, dims.head}, 2);
      const Tensor v = normal(dtype, {1, kLength, kHeads, dims.value}, 3);
      const Tensor whole = attention(context(), q, k, v, options);
      for (const CacheKind& kind : {CacheKind{"contiguous"}, CacheKind{"paged", 16}}) {
        KvCache cache = make_cache(context(), kind,
                                   {.num_kv_heads = kHeads,
                                    .head_dim = dims.head,
                                    .value_dim = dims.value,
                                    .format = dtype},
                                   8192);
        Tensor out(context(), dtype, whole.shape());
        std::int64_t done = 0;
        for (const std::int64_t count :
             {300, 211, 1, 1, 700, 6, 829, 1, 1, 100, 1, 1945, 1, 1, 100, 1, 1}) {
          const auto tokens = [&](const Tensor& all) {
            return all.view().slice(1, done, done + count);
          };
          KvAppend append(context(), cache, tokens(k), tokens(v));
          attention(context(), tokens(q), append.view(), options,
                    out.view().slice(1, done, done + count));
          append.commit();
          done += count;
        }
        ASSERT_EQ(done, kLength);
        EXPECT_TRUE(same_bits(out, whole))
            << name_of(dtype) << ", " << dims.describe() << ", " << kind.name;
      }
    }
  }
}

/// A large sink makes weights so small that some results are between 0 and the smallest number. The
/// sign of the 0 that they become is the same where segments are folded apart.
TEST_F(CudaSegments, P10_ResultsThatUnderflow) {
  Tensor sinks(DType::kF32, {kHeads});
  for (std::int64_t head = 0; head < kHeads; ++head) {
    sinks.data_as<float>()[head] = 103.0F - 6.0F * static_cast<float>(head);
  }
  sinks = sinks.to(context());
  const AttentionOptions options{.causal = true, .sinks = sinks};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const HeadDims& dims : {HeadDims{64, 64}, HeadDims{128, 128}, HeadDims{256, 256}}) {
      const Tensor q = normal(dtype, {1, kLength, kHeads, dims.head}, 1);
      const Tensor k = normal(dtype, {1, kLength, kHeads, dims.head}, 2);
      const Tensor v = normal(dtype, {1, kLength, kHeads, dims.value}, 3, 1e-3);
      const Tensor whole = attention(context(), q, k, v, options);
      const auto last = [](const Tensor& all) { return all.view().slice(1, kLength - 1, kLength); };
      Tensor alone(context(), dtype, {1, 1, kHeads, dims.value});
      attention(context(), last(q), k, v, options, alone);
      EXPECT_TRUE(same_bits(alone, Tensor::copy_of(context(), last(whole))))
          << name_of(dtype) << ", " << dims.describe();
    }
  }
}

/// Some of the heads, as a rank has them, have the bits of all.
TEST_F(CudaSegments, HeadsOfAPartHaveTheBitsOfTheWhole) {
  const AttentionOptions options{.causal = true};
  for (const std::int64_t queries : {std::int64_t{1}, kLength}) {
    const Tensor q = normal(DType::kBF16, {1, queries, 64, 192}, 1);
    const Tensor k = normal(DType::kBF16, {1, kLength, 64, 192}, 2);
    const Tensor v = normal(DType::kBF16, {1, kLength, 64, 128}, 3);
    const Tensor whole = attention(context(), q, k, v, options);
    const auto part = [](const Tensor& all) { return all.view().slice(2, 8, 10); };
    Tensor out(context(), DType::kBF16, {1, queries, 2, 128});
    attention(context(), part(q), part(k), part(v), options, out);
    EXPECT_TRUE(same_bits(out, Tensor::copy_of(context(), part(whole)))) << queries << " queries";
  }
}

/// Groups that are larger than a tile, that do not divide it, or do so in part.
TEST_F(CudaHopperSegments, GroupsOfEverySize) {
  for (const std::int64_t group : {2, 5, 12, 36, 96, 128, 256}) {
    for (const HeadDims& dims : {HeadDims{64, 64}, HeadDims{128, 128}, HeadDims{256, 256}}) {
      for (const std::int64_t queries : {1, 2, 40, 150, 200}) {
        const Tensor q = normal(DType::kBF16, {2, queries, 2 * group, dims.head}, 1);
        const Tensor k = normal(DType::kBF16, {2, 600, 2, dims.head}, 2);
        const Tensor v = normal(DType::kBF16, {2, 600, 2, dims.value}, 3);
        context().synchronize();
        for (const AttentionOptions& options :
             {AttentionOptions{.causal = true}, AttentionOptions{.softcap = 20}}) {
          EXPECT_TRUE(same_bits(attention(*hopper_, q, k, v, options),
                                attention(*generic_, q, k, v, options)))
              << "group " << group << ", " << dims.describe() << ", " << queries << " queries";
        }
      }
    }
  }
}

/// Dims on either side of those with longer segments.
TEST_F(CudaHopperSegments, SameBitsAsTheGenericKernels) {
  for (const HeadDims& dims :
       {HeadDims{128, 128}, HeadDims{136, 72}, HeadDims{192, 128}, HeadDims{192, 136},
        HeadDims{200, 128}, HeadDims{256, 256}, HeadDims{64, 256}, HeadDims{256, 264}}) {
    for (const std::int64_t queries : {std::int64_t{1}, std::int64_t{100}, kLength}) {
      const Tensor q = normal(DType::kBF16, {1, queries, kHeads, dims.head}, 1, 3);
      const Tensor k = normal(DType::kBF16, {1, kLength, kHeads, dims.head}, 2, 3);
      const Tensor v = normal(DType::kBF16, {1, kLength, kHeads, dims.value}, 3);
      context().synchronize();
      for (const AttentionOptions& options :
           {AttentionOptions{.causal = true},
            AttentionOptions{.causal = true, .window_left = 1500}}) {
        EXPECT_TRUE(same_bits(attention(*hopper_, q, k, v, options),
                              attention(*generic_, q, k, v, options)))
            << dims.describe() << ", " << queries << " queries";
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
