// Promise 10 on CPUs: with ContextOptions::chunk_invariant, how a token was fed does not matter.
// Its output has the same bits in a whole forward, in the training forward, and in chunks of any
// size over contiguous and paged caches.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/attention.h"
#include "ladon/error.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"
#include "support/runnable_isas.h"

namespace ladon::test {
namespace {

const std::vector<CacheKind> kKinds = {{"contiguous"}, {"paged", 7}, {"paged", 64}};
/// Chunks of one size, or of a few by turns.
const std::vector<std::vector<std::int64_t>> kChunks = {{1}, {7}, {200, 1, 1, 33}};

void in_chunks(std::int64_t length, const std::vector<std::int64_t>& chunks,
               const std::function<void(std::int64_t, std::int64_t)>& step) {
  std::int64_t done = 0;
  for (std::size_t turn = 0; done < length; ++turn) {
    const std::int64_t end = std::min(length, done + chunks[turn % chunks.size()]);
    step(done, end);
    done = end;
  }
}

class ChunkInvariance : public testing::TestWithParam<Isa> {
 protected:
  Context context_{ContextOptions{.num_threads = 2, .isa = GetParam(), .chunk_invariant = true}};

  static bool same_bits(const Tensor& a, const Tensor& b) {
    return a.shape() == b.shape() &&
           std::memcmp(a.data(), b.data(),
                       static_cast<std::size_t>(a.num_elements()) * size_of(a.dtype())) == 0;
  }
  Tensor normal(DType dtype, const Dims& shape, std::uint64_t seed) const {
    Tensor tensor(dtype, shape);
    fill_normal(context_, tensor, 0, 1, seed);
    return tensor;
  }

  /// The outputs over a cache that is filled chunk by chunk.
  Tensor attend_in_chunks(const Tensor& q, const Tensor& k, const Tensor& v, DType format,
                          const CacheKind& kind, const std::vector<std::int64_t>& chunks,
                          const AttentionOptions& options) const {
    const KvCacheOptions cache_options{.batch = q.size(0),
                                       .num_kv_heads = k.size(2),
                                       .head_dim = k.size(3),
                                       .value_dim = v.size(3),
                                       .format = format};
    KvCache cache = make_cache(context_, kind, cache_options, 2 * q.size(0) * q.size(1) + 64);
    Tensor out(q.dtype(), {q.size(0), q.size(1), q.size(2), v.size(3)});
    in_chunks(q.size(1), chunks, [&](std::int64_t begin, std::int64_t end) {
      const auto tokens = [&](const Tensor& all) { return all.view().slice(1, begin, end); };
      KvAppend append(context_, cache, tokens(k), tokens(v));
      attention(context_, tokens(q), append.view(), options, out.view().slice(1, begin, end));
      append.commit();
    });
    return out;
  }

  void expect_layer_is_invariant(const AttentionLayer& layer, bool trains) const {
    constexpr std::int64_t kLength = 150;
    const Tensor x = normal(layer.dtype(), {2, kLength, layer.embed_dim()}, 5);
    const Tensor whole = layer.forward(context_, x);
    if (trains) {
      EXPECT_TRUE(same_bits(layer.forward_training(context_, {.query = x}).out, whole));
    }
    for (const CacheKind& kind : kKinds) {
      for (const std::vector<std::int64_t>& chunks : kChunks) {
        KvCache cache = make_cache(context_, kind, layer.cache_options(2), 8192);
        Tensor out(x.dtype(), x.shape());
        in_chunks(kLength, chunks, [&](std::int64_t begin, std::int64_t end) {
          layer.forward(context_, x.view().slice(1, begin, end), cache, {},
                        out.view().slice(1, begin, end));
        });
        EXPECT_TRUE(same_bits(out, whole)) << name_of(layer.dtype()) << " " << kind.name << " "
                                           << kind.page_size << ", chunks of " << chunks[0];
      }
    }
  }
};

TEST_P(ChunkInvariance, Attention) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64}) {
    for (const std::int64_t length : {1, 67, 601}) {
      const Tensor q = normal(dtype, {2, length, 6, 40}, 1);
      const Tensor k = normal(dtype, {2, length, 2, 40}, 2);
      const Tensor v = normal(dtype, {2, length, 2, 24}, 3);
      const Tensor sinks = normal(DType::kF32, {6}, 4);
      const Tensor slopes = Tensor::from_values(DType::kF32, {6}, {.5, .2, .1, .05, .01, 0});
      const AttentionOptions plain{.causal = true};
      const AttentionOptions rules{.causal = true,
                                   .window_left = 150,
                                   .softcap = 20,
                                   .alibi_slopes = slopes,
                                   .sinks = sinks};
      for (const AttentionOptions& options : {plain, rules}) {
        const Tensor whole = attention(context_, q, k, v, options);
        for (const CacheKind& kind : kKinds) {
          for (const std::vector<std::int64_t>& chunks : kChunks) {
            EXPECT_TRUE(same_bits(attend_in_chunks(q, k, v, dtype, kind, chunks, options), whole))
                << name_of(dtype) << " length " << length << ", " << kind.name << " "
                << kind.page_size << ", chunks of " << chunks[0];
          }
        }
      }
    }
  }
}

/// Over int8, whose whole is one call over a cache too.
TEST_P(ChunkInvariance, AttentionOverInt8) {
  const Tensor q = normal(DType::kBF16, {1, 300, 4, 64}, 1);
  const Tensor k = normal(DType::kBF16, {1, 300, 1, 64}, 2);
  const Tensor whole =
      attend_in_chunks(q, k, k, DType::kI8, {"contiguous"}, {300}, {.causal = true});
  for (const CacheKind& kind : kKinds) {
    for (const std::vector<std::int64_t>& chunks : kChunks) {
      EXPECT_TRUE(
          same_bits(attend_in_chunks(q, k, k, DType::kI8, kind, chunks, {.causal = true}), whole))
          << kind.name << " " << kind.page_size << ", chunks of " << chunks[0];
    }
  }
}

/// Sums are folded every 4096 keys, and a window begins in another block for every tile.
TEST_P(ChunkInvariance, WindowLongerThanAFold) {
  constexpr std::int64_t kLength = 9000;
  const Tensor q = normal(DType::kF32, {1, 200, 2, 16}, 1);
  const Tensor k = normal(DType::kF32, {1, kLength, 1, 16}, 2);
  const AttentionOptions options{.causal = true, .window_left = 4500};
  const Tensor whole = attention(context_, q, k, k, options);
  for (const std::int64_t query : {0, 1, 63, 150, 199}) {
    // As a decoder would see it: the last query, over the keys so far.
    const Tensor alone = attention(context_, q.view().slice(1, query, query + 1),
                                   k.view().slice(1, 0, kLength - 199 + query),
                                   k.view().slice(1, 0, kLength - 199 + query), options);
    EXPECT_TRUE(
        same_bits(alone, Tensor::copy_of(context_, whole.view().slice(1, query, query + 1))))
        << query;
  }
}

TEST_P(ChunkInvariance, MultiHeadAttention) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const MultiHeadAttention layer({.embed_dim = 96,
                                    .num_heads = 6,
                                    .num_kv_heads = 2,
                                    .head_dim = 32,
                                    .query_bias = true,
                                    .out_bias = true,
                                    .causal = true,
                                    .rope = RopeOptions{},
                                    .qk_norm = true,
                                    .sinks = true,
                                    .dtype = dtype},
                                   3);
    expect_layer_is_invariant(layer, /*trains=*/true);
  }
}

TEST_P(ChunkInvariance, LatentAttention) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    LatentAttention layer({.embed_dim = 64,
                           .num_heads = 4,
                           .query_rank = 24,
                           .kv_rank = 32,
                           .nope_dim = 16,
                           .rope_dim = 8,
                           .value_dim = 24,
                           .causal = true,
                           .dtype = dtype},
                          3);
    for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
      layer.set_form(form);
      expect_layer_is_invariant(layer, form == LatentForm::kExpanded);  // training expands
    }
  }
}

TEST_P(ChunkInvariance, WindowCachesAreRefused) {
  const Tensor q = normal(DType::kF32, {1, 1, 2, 8}, 1);
  const Tensor k = normal(DType::kF32, {1, 1, 1, 8}, 2);
  KvCache cache = KvCache::window(context_, {.num_kv_heads = 1, .head_dim = 8}, 16);
  cache.append(context_, k, k);
  Tensor out(DType::kF32, q.shape());
  try {
    attention(context_, q, cache.view(), {.causal = true, .window_left = 16}, out);
    FAIL() << "no Error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("window cache"), std::string::npos) << error.what();
  }
}

/// The reference, which computes row by row in double, is left out.
std::vector<Isa> kernel_isas() {
  std::vector<Isa> isas = runnable_isas();
  std::erase(isas, Isa::kReference);
  return isas;
}

INSTANTIATE_TEST_SUITE_P(Isas, ChunkInvariance, testing::ValuesIn(kernel_isas()),
                         [](const testing::TestParamInfo<Isa>& isa) {
                           return std::string(name_of(isa.param));
                         });

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ChunkInvariance);  // with LADON_ISA=reference

}  // namespace
}  // namespace ladon::test
