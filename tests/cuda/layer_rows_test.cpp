// Promise 6 for whole layers on a GPU: a token's bits do not depend on how many others are computed
// with it. Projections have kernels for few, some and many rows, decoding and prefill have their
// own, and all of them sum in one order.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda/cuda_test.h"
#include "ladon/kv_cache.h"
#include "ladon/multi_head_attention.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kMostRows = 4096;
constexpr std::int64_t kRows[] = {1, 2, 7, 8, 9, 16, 17, 64, 65, 256, kMostRows};

class CudaLayerRows : public CudaTest {
 protected:
  /// in_features of 2.5 chunks, and out_features that are not a multiple of any tile.
  MultiHeadAttention layer(DType dtype) const {
    MultiHeadAttention made({.embed_dim = 648,
                             .num_heads = 6,
                             .num_kv_heads = 2,
                             .head_dim = 68,
                             .query_bias = true,
                             .key_bias = true,
                             .out_bias = true,
                             .causal = true,
                             .rope = RopeOptions{},
                             .qk_norm = true,
                             .dtype = dtype},
                            11);
    made.to(context());
    return made;
  }

  static Tensor first_rows(const Context& context, const Tensor& tensor, int dim,
                           std::int64_t rows) {
    return Tensor::copy_of(context, tensor.view().slice(dim, 0, rows));
  }
};

TEST_F(CudaLayerRows, P6_TokensOfOneSequence) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const MultiHeadAttention tested = layer(dtype);
    const Tensor x = normal(dtype, {1, kMostRows, tested.embed_dim()}, 1);
    const Tensor all = tested.forward(context(), x);
    for (const std::int64_t rows : kRows) {
      const Tensor some = tested.forward(context(), first_rows(context(), x, 1, rows));
      EXPECT_TRUE(same_bits(some, first_rows(context(), all, 1, rows)))
          << name_of(dtype) << ", " << rows << " rows";
    }
  }
}

TEST_F(CudaLayerRows, P6_TokensOfManySequences) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    const MultiHeadAttention tested = layer(dtype);
    const KvCacheOptions holds = tested.cache_options(kMostRows);
    constexpr std::int64_t kPrompt = 20;
    std::vector<std::int64_t> lengths;  // of the sequences, 1 to 20
    for (std::int64_t b = 0; b < kMostRows; ++b) lengths.push_back(1 + b * 7 % kPrompt);
    const Tensor k = normal(dtype, {kMostRows, kPrompt, holds.num_kv_heads, holds.head_dim}, 2);
    const Tensor v = normal(dtype, {kMostRows, kPrompt, holds.num_kv_heads, holds.head_dim}, 3);
    const Tensor x = normal(dtype, {kMostRows, 1, tested.embed_dim()}, 4);
    const auto decode = [&](std::int64_t rows) {
      KvCache cache = KvCache::contiguous(context(), tested.cache_options(rows));
      cache.append(context(), k.view().slice(0, 0, rows), v.view().slice(0, 0, rows),
                   std::span(lengths).first(static_cast<std::size_t>(rows)));
      return tested.forward(context(), first_rows(context(), x, 0, rows), cache);
    };
    const Tensor all = decode(kMostRows);
    for (const std::int64_t rows : kRows) {
      EXPECT_TRUE(same_bits(decode(rows), first_rows(context(), all, 0, rows)))
          << name_of(dtype) << ", " << rows << " rows";
    }
  }
}

// The kernel of 9 to 64 rows gives each multiprocessor 16 to 64 features, one tile or several. That
// of more rows has tiles of 64 to 192 features (136 heads and 256 rows: 96).
TEST_F(CudaLayerRows, P6_AsManyFeaturesAsThereAre) {
  constexpr std::int64_t kTokens = 300;
  constexpr std::int64_t kSome[] = {1, 5, 16, 17, 33, 64, 65, 128, 130, 256};
  for (const std::int64_t heads : {12, 44, 60, 96, 136, 200, 260}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      MultiHeadAttention tested({.embed_dim = 328,
                                 .num_heads = heads,
                                 .num_kv_heads = heads / 4,
                                 .head_dim = 40,
                                 .key_bias = true,
                                 .causal = true,
                                 .dtype = dtype},
                                12);
      tested.to(context());
      const Tensor x = normal(dtype, {1, kTokens, tested.embed_dim()}, 1);
      const Tensor all = tested.forward(context(), x);
      for (const std::int64_t rows : kSome) {
        const Tensor some = tested.forward(context(), first_rows(context(), x, 1, rows));
        EXPECT_TRUE(same_bits(some, first_rows(context(), all, 1, rows)))
            << name_of(dtype) << ", " << heads << " heads, " << rows << " rows";
      }
    }
  }
}

// Over a cache, keys are rotated where they are written to it.
TEST_F(CudaLayerRows, P10_RotatedIntoACache) {
  constexpr std::int64_t kTokens = 40;
  constexpr std::int64_t kBatch = 3;
  RopeOptions interleaved{.layout = RopeLayout::kInterleaved};
  RopeOptions partial{.rotary_dim = 36};
  for (const RopeOptions& rope : {RopeOptions{}, interleaved, partial}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32, DType::kF64}) {
      MultiHeadAttention tested({.embed_dim = 64,
                                 .num_heads = 6,
                                 .num_kv_heads = 2,
                                 .head_dim = 44,
                                 .causal = true,
                                 .rope = rope,
                                 .dtype = dtype},
                                13);
      tested.to(context());
      const Tensor x = normal(dtype, {kBatch, kTokens, tested.embed_dim()}, 1);
      const Tensor all = tested.forward(context(), x);
      for (const std::int64_t chunk : {1, 3, 40}) {
        KvCache cache = KvCache::contiguous(context(), tested.cache_options(kBatch));
        for (std::int64_t begin = 0; begin < kTokens; begin += chunk) {
          const std::int64_t end = std::min(begin + chunk, kTokens);
          const Tensor tokens = tested.forward(
              context(), Tensor::copy_of(context(), x.view().slice(1, begin, end)), cache);
          EXPECT_TRUE(
              same_bits(tokens, Tensor::copy_of(context(), all.view().slice(1, begin, end))))
              << name_of(dtype) << ", tokens " << begin << " to " << end;
        }
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
