// TensorParallelLatentAttention over latents that are spread over ranks, against a LatentAttention
// over a KvCache in one process: the same bits in the expanded form and, with the reproducible
// option, in decoding.
#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ladon/paged_kv_cache.h"
#include "ladon/spread_cache.h"
#include "parallel/latent_layers.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/isas.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kPrompt = 1100;  // three splits; sequence 1 has one
constexpr std::int64_t kShort = 300;

KvCache make_cache(const Context& context, const AttentionLayer& layer, KvFormat format,
                   bool paged) {
  if (!paged) return KvCache::contiguous(context, layer.cache_options(kBatch, format));
  return KvCache::paged(std::make_shared<PagePool>(context, layer.cache_options(1, format), 64, 40),
                        kBatch);
}

/// A prompt, single tokens, and then chunks of other lengths for each sequence, with a mask.
/// step(x, call) is a cached call of the layer; returns what each of them gave.
template <class Step>
std::vector<Tensor> decode(const LatentAttention& layer, const Step& step) {
  std::vector<Tensor> outs;
  const std::int64_t prompt[] = {kPrompt, kShort};
  outs.push_back(
      step(normal(layer.dtype(), {kBatch, kPrompt, kEmbed}, 1), CachedCall{.new_lengths = prompt}));
  for (std::uint64_t i = 0; i < 2; ++i) {
    outs.push_back(step(normal(layer.dtype(), {kBatch, 1, kEmbed}, 2 + i), CachedCall{}));
  }
  const std::int64_t chunks[] = {1, 0};
  const Tensor bias = normal(DType::kF32, {1, layer.num_heads(), 1, kPrompt + 3}, 5);
  outs.push_back(step(normal(layer.dtype(), {1, kEmbed}, 6),  // packed
                      CachedCall{.new_lengths = chunks, .bias = bias}));
  return outs;
}

std::vector<Tensor> decode_alone(const Context& context, const LatentAttention& layer,
                                 KvFormat format, bool paged) {
  KvCache cache = make_cache(context, layer, format, paged);
  return decode(layer, [&](const Tensor& x, const CachedCall& call) {
    return layer.forward(context, x, cache, call);
  });
}

/// As long as the cache, its communicator and the layer live.
std::vector<Tensor> decode_spread(const Context& context, const LatentAttention& whole,
                                  Communicator& communicator, KvFormat format, bool paged,
                                  bool reproducible) {
  TensorParallelLatentAttention layer(communicator, whole.options());
  layer.set_whole_parameters(context, whole);
  SpreadKvCache cache(communicator, make_cache(context, layer, format, paged));
  std::vector<Tensor> outs = decode(whole, [&](const Tensor& x, const CachedCall& call) {
    return layer.forward(context, x, cache, call, {.reproducible = reproducible});
  });
  EXPECT_EQ(cache.length(0), kPrompt + 3);
  EXPECT_EQ(cache.length(1), kShort + 2);
  EXPECT_EQ(cache.local().length(0),
            SpreadKvCache::keys_of(communicator.rank(), communicator.size(), kPrompt + 3));
  return outs;
}

class SpreadLatent : public testing::TestWithParam<Isa> {
 protected:
  Context context(int threads) const {
    return Context(ContextOptions{.num_threads = threads, .isa = GetParam()});
  }
};

INSTANTIATE_TEST_SUITE_P(Isas, SpreadLatent, testing::ValuesIn(runnable_isas()), isa_test_name);

TEST_P(SpreadLatent, ForwardHasTheBitsOfOneProcess) {
  for (const int ranks : rank_counts()) {
    if (GetParam() == Isa::kReference && ranks != 2) continue;  // slow
    for (const LatentAttentionOptions& options : layer_options(ranks)) {
      LatentAttention whole = whole_layer(options);
      for (const LatentForm form : {LatentForm::kAuto, LatentForm::kExpanded}) {
        whole.set_form(form);
        const bool paged = form == LatentForm::kAuto;
        const KvFormat format = options.dtype;
        const std::vector<Tensor> expected = decode_alone(context(2), whole, format, paged);
        expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
          const std::vector<Tensor> got =
              decode_spread(context(1), whole, communicator, format, paged, true);
          for (std::size_t i = 0; i < got.size(); ++i) {
            const std::string what = std::to_string(ranks) + " ranks, call " + std::to_string(i);
            if (GetParam() == Isa::kReference) {  // whose loops do not split keys
              expect_near(got[i], expected[i], 0.02, what);
            } else {
              EXPECT_TRUE(same_bits(got[i], expected[i])) << what;
            }
          }
        }));
      }
    }
  }
}

TEST_P(SpreadLatent, ChunksThatAreAbsorbedAreTheSameForAnyNumberOfRanks) {
  if (GetParam() == Isa::kReference) GTEST_SKIP() << "slow, and has no tiles";
  for (const int ranks : rank_counts()) {
    LatentAttentionOptions options = layer_options(ranks).front();
    options.form = LatentForm::kAbsorbed;
    const LatentAttention whole = whole_layer(options);
    const std::vector<Tensor> expected = decode_alone(context(2), whole, DType::kI8, false);
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      const std::unique_ptr<Communicator> alone = communicator.split(communicator.rank(), 0);
      const auto run = [&](Communicator& where) {
        return decode_spread(own, whole, where, DType::kI8, false, true);
      };
      const std::vector<Tensor> got = run(communicator);
      const std::vector<Tensor> one_rank = run(*alone);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same_bits(got[i], one_rank[i])) << ranks << " ranks, call " << i;
        expect_near(got[i], expected[i], 1e-4, std::to_string(ranks) + " ranks");
      }
    }));
  }
}

TEST_P(SpreadLatent, OnePartOfEachRank) {
  if (GetParam() != runnable_isas().back()) GTEST_SKIP() << "one instruction set is enough";
  for (const int ranks : rank_counts()) {
    const LatentAttention whole = whole_layer(layer_options(ranks).front());
    const std::vector<Tensor> expected = decode_alone(context(2), whole, DType::kF32, false);
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context(1);
      const auto run = [&] {
        return decode_spread(own, whole, communicator, DType::kF32, false, false);
      };
      const std::vector<Tensor> first = run();
      const std::vector<Tensor> second = run();
      for (std::size_t i = 0; i < first.size(); ++i) {
        expect_near(first[i], expected[i], 1e-5, std::to_string(ranks) + " ranks");
        EXPECT_TRUE(same_bits(first[i], second[i])) << ranks << " ranks, call " << i;
      }
    }));
  }
}

TEST(SpreadLatentBytes, AreThoseOfTheFormulas) {
  for (const int ranks : rank_counts()) {
    const LatentAttention whole = whole_layer(layer_options(ranks).front());
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own(ContextOptions{.num_threads = 1});
      const std::int64_t rank = communicator.rank();
      TensorParallelLatentAttention layer(communicator, whole.options());
      layer.set_whole_parameters(own, whole);
      SpreadKvCache cache(communicator, make_cache(own, layer, DType::kF32, false));
      const std::int64_t heads = layer.own_options().num_heads;
      const std::int64_t columns = kEmbed * (rank + 1) / ranks - kEmbed * rank / ranks;
      const auto of_outputs = [&](std::int64_t rows) {
        return (ranks - 1) * rows * (heads * whole.value_dim() + columns) * 4;
      };
      // Long: expanded, so that latents are gathered.
      layer.forward(own, normal(DType::kF32, {kBatch, kPrompt, kEmbed}, 1), cache);
      const std::int64_t kept = SpreadKvCache::keys_of(communicator.rank(), ranks, kPrompt);
      EXPECT_EQ(
          communicator.statistics().bytes_sent,
          (ranks - 1) * kBatch * kept * whole.latent_dim() * 4 + of_outputs(kBatch * kPrompt));
      // A token: absorbed, so that queries and partial sums travel.
      for (const bool reproducible : {false, true}) {
        communicator.reset_statistics();
        layer.forward(own, normal(DType::kF32, {kBatch, 1, kEmbed}, 2), cache, {},
                      {.reproducible = reproducible});
        const std::int64_t splits = (cache.length(0) + 511) / 512;
        const std::int64_t of_rank = (splits + ranks - 1 - rank) / ranks;
        const std::int64_t parts = reproducible ? of_rank : std::min<std::int64_t>(of_rank, 1);
        EXPECT_EQ(communicator.statistics().bytes_sent,
                  (ranks - 1) * kBatch * heads *
                          (whole.latent_dim() * 4 + parts * (whole.kv_rank() * 4 + 8)) +
                      of_outputs(kBatch));
      }
    }));
  }
}

TEST(SpreadLatentErrors, ACacheGrowsOnAllRanksOrOnNone) {
  const LatentAttentionOptions options{
      .embed_dim = 8, .num_heads = 4, .kv_rank = 4, .nope_dim = 4, .rope_dim = 2, .causal = true};
  expect_all_return(run_ranks(2, [&](Communicator& communicator) {
    const Context& own = host_context();
    const bool is_first = communicator.rank() == 0;
    TensorParallelLatentAttention layer(communicator, options);
    // Rank 1 has space for 100 latents.
    SpreadKvCache cache(communicator,
                        KvCache::contiguous(own, layer.cache_options(), is_first ? 512 : 100));
    const Tensor x = normal(DType::kF32, {1, 600, 8}, 1);
    layer.forward(own, x, cache);
    EXPECT_EQ(cache.length(), 600);
    const std::string full =
        error_of([&] { layer.forward(own, x.view().slice(1, 0, 13), cache); },
                 is_first ? ErrorCode::kCommunication : ErrorCode::kInvalidArgument);
    EXPECT_NE(full.find("capacity"), std::string::npos) << full;
    // Ranks bring other numbers of tokens.
    error_of([&] { layer.forward(own, x.view().slice(1, 0, is_first ? 1 : 2), cache); },
             ErrorCode::kCommunication);
    EXPECT_EQ(cache.length(), 600);
    EXPECT_EQ(cache.local().length(), is_first ? 512 : 88);
    EXPECT_EQ(communicator.broken(), "");
    layer.forward(own, x.view().slice(1, 0, 1), cache);
    EXPECT_EQ(cache.length(), 601);
    const std::unique_ptr<Communicator> other = communicator.split(0, communicator.rank());
    SpreadKvCache elsewhere(*other, KvCache::contiguous(own, layer.cache_options()));
    EXPECT_EQ(error_of([&] { layer.forward(own, x, elsewhere); }),
              "TensorParallelLatentAttention::forward: cache: got one over another communicator, "
              "expected one over the layer's");
    SpreadKvCache keys(communicator, KvCache::contiguous(own, {.num_kv_heads = 1, .head_dim = 6}));
    EXPECT_EQ(error_of([&] { layer.forward(own, x, keys); }),
              "TensorParallelLatentAttention::forward: cache: got one of 1 KV heads of 6 and 6, "
              "expected the layer's 1 KV heads of 6 and 4 within them");
  }));
}

}  // namespace
}  // namespace ladon::test
