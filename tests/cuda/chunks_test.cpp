// Promise 10: how a token was fed does not matter. Its output has the same bits in a whole forward,
// in the training forward, and in chunks of any size over a cache of any kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "cuda/cuda_test.h"
#include "ladon/attention.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "ladon/random.h"

namespace ladon::test {
namespace {

constexpr DType kFloats[] = {DType::kF32, DType::kF16, DType::kBF16};
constexpr std::int64_t kWindow = 150;
constexpr std::int64_t kBatch = 2;

/// Chunks of one size, or of a few in turn.
const std::vector<std::vector<std::int64_t>> kChunks = {{1}, {7}, {64}, {129}, {200, 1, 1, 33}};

std::vector<CacheKind> kinds_of(bool windowed) {
  std::vector<CacheKind> kinds = {{"contiguous"}, {"paged", 7}, {"paged", 64}};
  if (windowed) kinds.push_back({"window", 0, kWindow});
  return kinds;
}

std::string text_of(const std::vector<std::int64_t>& chunks) {
  return Dims(std::span<const std::int64_t>(chunks)).to_string();
}

/// Lengths below and past one and two key splits, and two random ones.
std::vector<std::int64_t> lengths() {
  Random random(7);
  return {1, 131, 1023 + random.below(3), 300 + random.below(300), 2049 + random.below(300)};
}

class CudaChunks : public CudaTest {
 protected:
  /// Calls step(begin, end) for the chunks of a sequence.
  static void in_chunks(std::int64_t length, const std::vector<std::int64_t>& chunks,
                        const std::function<void(std::int64_t, std::int64_t)>& step) {
    std::int64_t done = 0;
    for (std::size_t turn = 0; done < length; ++turn) {
      const std::int64_t end = std::min(length, done + chunks[turn % chunks.size()]);
      step(done, end);
      done = end;
    }
  }

  /// Whole, in training, and in every kind of chunk.
  void expect_same_bits(const AttentionLayer& layer, std::int64_t length, bool windowed,
                        bool trains) {
    const Tensor x = normal(layer.dtype(), {kBatch, length, layer.embed_dim()}, 5);
    const Tensor whole = layer.forward(context(), x);
    const std::string what = std::string(name_of(layer.dtype())) + " length " +
                             std::to_string(length) + (windowed ? " window" : "");
    if (trains) {
      EXPECT_TRUE(same_bits(layer.forward_training(context(), {.query = x}).out, whole))
          << what << ", training";
    }
    for (const CacheKind& kind : kinds_of(windowed)) {
      for (const std::vector<std::int64_t>& chunks : kChunks) {
        KvCache cache = make_cache(context(), kind, layer.cache_options(kBatch), 8192);
        Tensor out(context(), x.dtype(), x.shape());
        in_chunks(length, chunks, [&](std::int64_t begin, std::int64_t end) {
          layer.forward(context(), x.view().slice(1, begin, end), cache, {},
                        out.view().slice(1, begin, end));
        });
        EXPECT_TRUE(same_bits(out, whole))
            << what << ", " << kind.name << " " << kind.page_size << ", chunks " << text_of(chunks);
      }
    }
  }
};

TEST_F(CudaChunks, P10_Attention) {
  for (const DType dtype : kFloats) {
    for (const std::int64_t length : lengths()) {
      const Tensor q = normal(dtype, {kBatch, length, 6, 64}, 1);
      const Tensor k = normal(dtype, {kBatch, length, 2, 64}, 2);
      const Tensor v = normal(dtype, {kBatch, length, 2, 64}, 3);
      const Tensor sinks = normal(DType::kF32, {6}, 4);
      const Tensor slopes = Tensor::from_values(DType::kF32, {6}, {.5, .2, .1, .05, .01, 0});
      const Tensor device_slopes = slopes.to(context());
      const AttentionOptions plain{.causal = true};
      const AttentionOptions windowed{.causal = true,
                                      .window_left = kWindow,
                                      .softcap = 20,
                                      .alibi_slopes = device_slopes,
                                      .sinks = sinks};
      for (const AttentionOptions& options : {plain, windowed}) {
        const bool has_window = options.window_left.has_value();
        const Tensor whole = attention(context(), q, k, v, options);
        for (const CacheKind& kind : kinds_of(has_window)) {
          for (const std::vector<std::int64_t>& chunks : kChunks) {
            const KvCacheOptions cache_options{
                .batch = kBatch, .num_kv_heads = 2, .head_dim = 64, .format = dtype};
            KvCache cache = make_cache(context(), kind, cache_options, 8192);
            Tensor out(context(), dtype, q.shape());
            in_chunks(length, chunks, [&](std::int64_t begin, std::int64_t end) {
              const auto tokens = [&](const Tensor& all) {
                return all.view().slice(1, begin, end);
              };
              KvAppend append(context(), cache, tokens(k), tokens(v));
              attention(context(), tokens(q), append.view(), options,
                        out.view().slice(1, begin, end));
              append.commit();
            });
            EXPECT_TRUE(same_bits(out, whole))
                << name_of(dtype) << " length " << length << (has_window ? " window, " : ", ")
                << kind.name << " " << kind.page_size << ", chunks " << text_of(chunks);
          }
        }
      }
    }
  }
}

/// One call over all tokens runs another kernel than tokens one by one.
TEST_F(CudaChunks, P10_AttentionOverQuantisedCaches) {
  constexpr std::int64_t kLength = 1100;
  for (const auto& [dtype, storage] : {std::pair{DType::kBF16, DType::kI8},
                                       {DType::kF16, DType::kI8},
                                       {DType::kBF16, DType::kF8E4M3},
                                       {DType::kF16, DType::kF8E4M3}}) {
    // For lambdas, which cannot capture a structured binding.
    const DType query_dtype = dtype;
    const DType format = storage;
    for (const std::int64_t dim : {128, 64, 80, 36}) {
      const Tensor q = normal(dtype, {kBatch, kLength, 6, dim}, 1);
      const Tensor k = normal(dtype, {kBatch, kLength, 2, dim}, 2);
      const Tensor v = normal(dtype, {kBatch, kLength, 2, dim}, 3);
      const KvCacheOptions cache_options{
          .batch = kBatch, .num_kv_heads = 2, .head_dim = dim, .format = format};
      const auto attend = [&](const CacheKind& kind, const AttentionOptions& options,
                              const std::vector<std::int64_t>& chunks) {
        KvCache cache = make_cache(context(), kind, cache_options, 2 * kBatch * kLength);
        Tensor out(context(), query_dtype, q.shape());
        in_chunks(kLength, chunks, [&](std::int64_t begin, std::int64_t end) {
          const auto tokens = [&](const Tensor& all) { return all.view().slice(1, begin, end); };
          KvAppend append(context(), cache, tokens(k), tokens(v));
          attention(context(), tokens(q), append.view(), options, out.view().slice(1, begin, end));
          append.commit();
        });
        return out;
      };
      for (const bool has_window : {false, true}) {
        AttentionOptions options{.causal = true};
        if (has_window) options.window_left = kWindow;
        const Tensor whole = attend({"contiguous"}, options, {kLength});
        for (const CacheKind& kind : kinds_of(has_window)) {
          EXPECT_TRUE(same_bits(attend(kind, options, {200, 1, 1, 2, 33, 1, 1, 1, 3}), whole))
              << name_of(dtype) << " over " << name_of(storage) << " dim " << dim << ", "
              << kind.name << " " << kind.page_size << (has_window ? ", window" : "");
        }
      }
    }
  }
}

/// A token whose scale is NaN shares a block of keys with those that are seen.
TEST_F(CudaChunks, NanOutsideTheWindowOfAQuantisedCache) {
  constexpr std::int64_t kLength = 200;
  const auto decode = [&](DType storage, bool has_nan) {
    Tensor k = Tensor(DType::kBF16, {1, kLength, 2, 64});
    fill_normal(host_context(), k, 0, 1, 5);
    if (has_nan) {
      auto* const bits = static_cast<std::uint16_t*>(k.data());
      std::fill_n(bits + 180 * 2 * 64, 2 * 64, std::uint16_t{0x7fc0});
    }
    const Tensor on_device = k.to(context());
    KvCache cache = KvCache::contiguous(
        context(), {.num_kv_heads = 2, .head_dim = 64, .format = storage}, kLength);
    cache.append(context(), on_device, on_device);
    const Tensor q = normal(DType::kBF16, {1, 1, 16, 64}, 6);
    Tensor out(context(), DType::kBF16, q.shape());
    attention(context(), q, cache.view(), {.causal = true, .window_left = 10}, out);
    return out;
  };
  for (const DType storage : {DType::kI8, DType::kF8E4M3}) {
    EXPECT_TRUE(same_bits(decode(storage, true), decode(storage, false))) << name_of(storage);
  }
}

TEST_F(CudaChunks, P10_MultiHeadAttention) {
  for (const DType dtype : kFloats) {
    for (const bool windowed : {false, true}) {
      MultiHeadAttentionOptions options{.embed_dim = 96,
                                        .num_heads = 6,
                                        .num_kv_heads = 2,
                                        .head_dim = 32,
                                        .query_bias = true,
                                        .value_bias = true,
                                        .out_bias = true,
                                        .causal = true,
                                        .rope = RopeOptions{},
                                        .qk_norm = true,
                                        .sinks = true,
                                        .dtype = dtype};
      if (windowed) options.window_left = kWindow;
      MultiHeadAttention layer(options, 3);
      layer.to(context());
      for (const std::int64_t length : lengths()) {
        expect_same_bits(layer, length, windowed, /*trains=*/true);
      }
    }
    // Sums over more features than one tile of a projection has.
    MultiHeadAttention wide({.embed_dim = 1100,
                             .num_heads = 8,
                             .num_kv_heads = 2,
                             .head_dim = 128,
                             .causal = true,
                             .rope = RopeOptions{},
                             .dtype = dtype},
                            4);
    wide.to(context());
    expect_same_bits(wide, 300, false, /*trains=*/true);
  }
}

TEST_F(CudaChunks, P10_LatentAttention) {
  for (const DType dtype : kFloats) {
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
    layer.to(context());
    for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
      layer.set_form(form);
      for (const std::int64_t length : lengths()) {
        // Training expands.
        expect_same_bits(layer, length, false, form == LatentForm::kExpanded);
      }
    }
  }
}

}  // namespace
}  // namespace ladon::test
