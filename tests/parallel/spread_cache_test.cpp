// Decoding over a cache that is spread over ranks, against a KvCache in one process: the same bits
// with the reproducible option, the same in every run without it, and no half-changed caches.
#include "ladon/spread_cache.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "ladon/paged_kv_cache.h"
#include "parallel/layer_support.h"
#include "parallel/ranks.h"
#include "support/error_of.h"
#include "support/isas.h"
#include "support/run_case.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kBatch = 2;
constexpr std::int64_t kHeads = 4;
constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kHeadDim = 16;
constexpr std::int64_t kValueDim = 12;
constexpr std::int64_t kPrompt = 1290;  // three splits; sequence 1 has one
constexpr std::int64_t kShort = 300;
constexpr std::int64_t kSteps = 2;
constexpr std::int64_t kLongest = kPrompt + kSteps;

struct SpreadCase {
  std::string name;
  AttentionOptions options{};
  DType dtype = DType::kF32;
  KvFormat format{};
  bool paged = false;
  bool latent = false;  // values are in the keys
};

class SpreadCache : public testing::TestWithParam<Isa> {
 protected:
  SpreadCache() {
    const AttentionOptions causal{.causal = true};
    cases_.push_back({"plain", causal});
    AttentionOptions rules = causal;
    rules.window_left = 700;
    rules.softcap = 3;
    rules.alibi_slopes = slopes_;
    rules.sinks = sinks_;
    cases_.push_back({"rules", rules, DType::kBF16, DType::kBF16, true});
    AttentionOptions masked = causal;
    masked.bias = bias_;
    masked.mask = mask_;
    cases_.push_back({"masked", masked, DType::kF32, DType::kI8});
    AttentionOptions with_sinks = causal;  // of sequence 1 too, which has one split
    with_sinks.sinks = sinks_;
    cases_.push_back({"sinks", with_sinks});
    with_sinks.window_left = 100;  // within one split of sequence 0
    cases_.push_back({"window with sinks", with_sinks});
    cases_.push_back({"fp8", causal, DType::kBF16, DType::kF8E4M3});
    cases_.push_back({"latent", causal, DType::kF32, DType::kBF16, true, true});
    for (std::int64_t i = 0; i < mask_.num_elements(); ++i) {
      static_cast<std::uint8_t*>(mask_.data())[i] = i % 3 == 0 ? 0 : 1;
    }
  }

  Context context() const { return Context(ContextOptions{.num_threads = 1, .isa = GetParam()}); }

  static KvCache make_cache(const Context& context, const SpreadCase& test) {
    const KvCacheOptions options{.batch = kBatch,
                                 .num_kv_heads = kKvHeads,
                                 .head_dim = kHeadDim,
                                 .value_dim = kValueDim,
                                 .values_in_keys = test.latent,
                                 .format = test.format};
    if (!test.paged) return KvCache::contiguous(context, options);
    return KvCache::paged(std::make_shared<PagePool>(context, options, 64, 48), kBatch);
  }

  const Tensor slopes_ = normal(DType::kF32, {kHeads}, 11);
  const Tensor sinks_ = normal(DType::kF32, {kHeads}, 12);
  const Tensor bias_ = normal(DType::kF32, {kBatch, 1, 1, kLongest}, 13);
  Tensor mask_{DType::kBool, {1, kHeads, 1, kLongest}};
  std::vector<SpreadCase> cases_;
};

INSTANTIATE_TEST_SUITE_P(Isas, SpreadCache, testing::ValuesIn(runnable_isas()), isa_test_name);

struct Decoded {
  std::vector<Tensor> outs;
  std::vector<Tensor> lses;
};

/// A prompt, and then tokens one by one. step(q, k, v, options, out, lse) appends and attends.
template <class Append, class Step>
Decoded decode(const SpreadCase& test, const Append& append, const Step& step) {
  const auto k_of = [&](std::int64_t tokens, std::uint64_t seed) {
    return normal(test.dtype, {kBatch, tokens, kKvHeads, kHeadDim}, seed);
  };
  const auto v_of = [&](std::int64_t tokens, std::uint64_t seed) {
    return test.latent ? Tensor() : normal(test.dtype, {kBatch, tokens, kKvHeads, kValueDim}, seed);
  };
  const auto view = [](const Tensor& tensor) {
    return tensor.rank() == 0 ? ConstTensorView() : ConstTensorView(tensor);
  };
  const std::int64_t lengths[] = {kPrompt, kShort};
  {
    const Tensor k = k_of(kPrompt, 1);
    const Tensor v = v_of(kPrompt, 2);
    append(k, view(v), lengths);
  }
  Decoded decoded;
  for (std::uint64_t i = 0; i < kSteps; ++i) {
    const Tensor q = normal(test.dtype, {kBatch, 1, kHeads, kHeadDim}, 20 + i);
    const Tensor k = k_of(1, 30 + i);
    const Tensor v = v_of(1, 40 + i);
    Tensor out(test.dtype, {kBatch, 1, kHeads, kValueDim});
    Tensor lse(DType::kF64, {kBatch, kHeads, 1});
    AttentionOptions options = test.options;
    const auto longest = kPrompt + static_cast<std::int64_t>(i) + 1;
    for (ConstTensorView* operand : {&options.mask, &options.bias}) {
      if (!operand->absent()) *operand = operand->slice(3, 0, longest);
    }
    step(q, k, view(v), options, out, lse);
    decoded.outs.push_back(std::move(out));
    decoded.lses.push_back(std::move(lse));
  }
  return decoded;
}

Decoded decode_alone(const Context& context, const SpreadCase& test, KvCache cache) {
  return decode(
      test,
      [&](const ConstTensorView& k, const ConstTensorView& v,
          std::span<const std::int64_t> lengths) { cache.append(context, k, v, lengths); },
      [&](const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
          const AttentionOptions& options, const TensorView& out, const TensorView& lse) {
        cache.append(context, k, v);
        attention(context, q, cache.view(), options, out, lse);
      });
}

Decoded decode_spread(const Context& context, const SpreadCase& test, SpreadKvCache& cache,
                      bool reproducible) {
  return decode(
      test,
      [&](const ConstTensorView& k, const ConstTensorView& v,
          std::span<const std::int64_t> lengths) { cache.append(context, k, v, lengths); },
      [&](const ConstTensorView& q, const ConstTensorView& k, const ConstTensorView& v,
          const AttentionOptions& options, const TensorView& out, const TensorView& lse) {
        cache.communicator().reset_statistics();
        append_and_attend(context, cache, q, k, v, options, out, lse,
                          {.reproducible = reproducible});
      });
}

TEST_P(SpreadCache, DecodingHasTheBitsOfOneProcess) {
  for (const int ranks : rank_counts()) {
    for (const SpreadCase& test : cases_) {
      const Decoded expected = decode_alone(context(), test, make_cache(context(), test));
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const Context own = context();
        const std::string what = test.name + ", " + std::to_string(ranks) + " ranks";
        SpreadKvCache cache(communicator, make_cache(own, test));
        const Decoded got = decode_spread(own, test, cache, true);
        EXPECT_EQ(cache.length(0), kLongest);
        EXPECT_EQ(cache.length(1), kShort + kSteps);
        EXPECT_EQ(cache.local().length(0),
                  SpreadKvCache::keys_of(communicator.rank(), ranks, kLongest));
        for (std::size_t i = 0; i < got.outs.size(); ++i) {
          if (GetParam() == Isa::kReference) {  // whose loops do not split keys
            expect_near(got.outs[i], expected.outs[i], 0.01, what);
            continue;
          }
          EXPECT_TRUE(same_bits(got.outs[i], expected.outs[i])) << what << ", step " << i;
          EXPECT_TRUE(same_bits(got.lses[i], expected.lses[i])) << what << ", step " << i;
        }
      }));
    }
  }
}

/// What a rank sends for one token of each sequence.
std::int64_t bytes_sent(int rank, int ranks, std::int64_t element) {
  std::int64_t bytes = 0;
  const auto heads_of = [&](int r) { return kHeads * (r + 1) / ranks - kHeads * r / ranks; };
  std::int64_t parts = 0;  // of both sequences
  for (const std::int64_t length : {kLongest, kShort + kSteps}) {
    if (SpreadKvCache::keys_of(rank, ranks, length) > 0) ++parts;
  }
  for (int other = 0; other < ranks; ++other) {
    if (other == rank) continue;
    bytes += parts * heads_of(other) * (kValueDim * 4 + 8);
    bytes += kBatch * heads_of(rank) * (kValueDim * element + 8);
  }
  return bytes;
}

TEST_P(SpreadCache, OnePartOfEachRank) {
  if (GetParam() != runnable_isas().back()) GTEST_SKIP() << "one instruction set is enough";
  for (const int ranks : rank_counts()) {
    for (const SpreadCase& test : cases_) {
      const Decoded expected = decode_alone(context(), test, make_cache(context(), test));
      const double tolerance = test.dtype == DType::kBF16 ? 0.01 : 1e-5;
      expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
        const Context own = context();
        SpreadKvCache cache(communicator, make_cache(own, test));
        const Decoded first = decode_spread(own, test, cache, false);
        EXPECT_EQ(
            communicator.statistics().bytes_sent,
            bytes_sent(communicator.rank(), ranks, static_cast<std::int64_t>(size_of(test.dtype))));
        cache.reset();
        const Decoded second = decode_spread(own, test, cache, false);
        for (std::size_t i = 0; i < first.outs.size(); ++i) {
          expect_near(first.outs[i], expected.outs[i], tolerance, test.name);
          expect_near(first.lses[i], expected.lses[i], 1e-6, test.name);
          EXPECT_TRUE(same_bits(first.outs[i], second.outs[i])) << test.name;
          EXPECT_TRUE(same_bits(first.lses[i], second.lses[i])) << test.name;
        }
      }));
    }
  }
}

TEST_P(SpreadCache, ChunksAreTheSameForAnyNumberOfRanks) {
  if (GetParam() == Isa::kReference) GTEST_SKIP() << "slow, and has no tiles";
  constexpr std::int64_t kChunk = 70;  // more rows than a tile
  SpreadCase test = cases_[1];
  const Tensor k = normal(test.dtype, {kBatch, kPrompt, kKvHeads, kHeadDim}, 1);
  const Tensor v = normal(test.dtype, {kBatch, kPrompt, kKvHeads, kValueDim}, 2);
  const Tensor q = normal(test.dtype, {kBatch, kChunk, kHeads, kHeadDim}, 3);
  for (const int ranks : rank_counts()) {
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context();
      const auto attend = [&](Communicator& where) {
        SpreadKvCache cache(where, make_cache(own, test));
        cache.append(own, k, v);
        cache.truncate(1, kShort + kChunk);
        Tensor out(test.dtype, {kBatch, kChunk, kHeads, kValueDim});
        spread_attention(own, cache, q, test.options, out, {}, {.reproducible = true});
        return out;
      };
      const std::unique_ptr<Communicator> alone = communicator.split(communicator.rank(), 0);
      const Tensor got = attend(communicator);
      EXPECT_TRUE(same_bits(got, attend(*alone))) << ranks << " ranks";
      KvCache whole = make_cache(own, test);
      whole.append(own, k, v);
      whole.truncate(1, kShort + kChunk);
      Tensor expected(test.dtype, got.shape());
      attention(own, q, whole.view(), test.options, expected);
      expect_near(got, expected, 0.01, std::to_string(ranks) + " ranks");
    }));
  }
}

TEST_P(SpreadCache, PackedQueriesHaveTheBitsOfOneProcess) {
  const SpreadCase& test = cases_[1];
  const std::int64_t lengths[] = {kPrompt, kShort};
  const std::int64_t offsets[] = {0, 3, 4};
  const Tensor k = normal(test.dtype, {kBatch, kPrompt, kKvHeads, kHeadDim}, 1);
  const Tensor v = normal(test.dtype, {kBatch, kPrompt, kKvHeads, kValueDim}, 2);
  const Tensor q = normal(test.dtype, {1, 4, kHeads, kHeadDim}, 3);
  AttentionOptions options = test.options;
  options.query_offsets = offsets;
  KvCache whole = make_cache(context(), test);
  whole.append(context(), k, v, lengths);
  Tensor expected(test.dtype, {1, 4, kHeads, kValueDim});
  Tensor expected_lse(DType::kF64, {1, kHeads, 4});
  attention(context(), q, whole.view(), options, expected, expected_lse);
  for (const int ranks : rank_counts()) {
    expect_all_return(run_ranks(ranks, [&](Communicator& communicator) {
      const Context own = context();
      SpreadKvCache cache(communicator, make_cache(own, test));
      cache.append(own, k, v, lengths);
      Tensor out(test.dtype, expected.shape());
      Tensor lse(DType::kF64, expected_lse.shape());
      spread_attention(own, cache, q, options, out, lse, {.reproducible = true});
      if (GetParam() == Isa::kReference) {  // whose loops do not split keys
        expect_near(out, expected, 0.01, std::to_string(ranks) + " ranks");
        return;
      }
      EXPECT_TRUE(same_bits(out, expected)) << ranks << " ranks";
      EXPECT_TRUE(same_bits(lse, expected_lse)) << ranks << " ranks";
    }));
  }
}

TEST(SpreadCacheCapacity, ASequenceThatOneRankCannotHold) {
  constexpr std::int64_t kCapacity = 1024;  // of each rank
  const KvCacheOptions options{.num_kv_heads = 1, .head_dim = 4};
  const Tensor k = normal(DType::kF32, {1, 4 * kCapacity, 1, 4}, 1);
  const Tensor v = normal(DType::kF32, k.shape(), 2);
  const Tensor q = normal(DType::kF32, {1, 1, 2, 4}, 3);
  expect_all_return(run_ranks(4, [&](Communicator& communicator) {
    const Context own(ContextOptions{.num_threads = 1});
    KvCache limited = KvCache::contiguous(own, options, kCapacity);
    error_of([&] { limited.append(own, k, v); });
    SpreadKvCache cache(communicator, std::move(limited));
    cache.append(own, k, v);
    EXPECT_EQ(cache.local().length(), kCapacity);
    Tensor out(DType::kF32, q.shape());
    spread_attention(own, cache, q, {}, out, {}, {.reproducible = true});
    KvCache whole = KvCache::contiguous(own, options);
    whole.append(own, k, v);
    Tensor expected(DType::kF32, q.shape());
    attention(own, q, whole.view(), {}, expected);
    EXPECT_TRUE(same_bits(out, expected));
  }));
}

TEST(SpreadCacheErrors, ACacheGrowsOnAllRanksOrOnNone) {
  const KvCacheOptions options{.num_kv_heads = 1, .head_dim = 4};
  expect_all_return(run_ranks(2, [&](Communicator& communicator) {
    const Context& own = host_context();
    EXPECT_EQ(error_of([&] { SpreadKvCache(communicator, KvCache::window(own, options, 8)); },
                       ErrorCode::kUnsupported),
              "SpreadKvCache: local: got a window, expected a contiguous or paged cache: a window "
              "fits one rank");
    EXPECT_EQ(error_of([&] {
                SpreadKvCache(communicator,
                              KvCache::paged(std::make_shared<PagePool>(own, options, 48, 2)));
              }),
              "SpreadKvCache: local: got pages of 48 tokens, expected a divisor of 512");
    // Rank 1 has space for 100 keys.
    SpreadKvCache cache(communicator,
                        KvCache::contiguous(own, options, communicator.rank() == 0 ? 512 : 100));
    const Tensor k(DType::kF32, {1, 600, 1, 4});
    cache.append(own, k, k);
    EXPECT_EQ(cache.length(), 600);
    const bool is_first = communicator.rank() == 0;
    const std::string full =
        error_of([&] { cache.append(own, k.view().slice(1, 0, 13), k.view().slice(1, 0, 13)); },
                 is_first ? ErrorCode::kCommunication : ErrorCode::kInvalidArgument);
    EXPECT_NE(full.find("capacity"), std::string::npos) << full;
    EXPECT_EQ(cache.length(), 600);
    EXPECT_EQ(cache.local().length(), is_first ? 512 : 88);
    // Ranks bring other numbers of tokens.
    const ConstTensorView some = k.view().slice(1, 0, is_first ? 1 : 2);
    const Tensor q(DType::kF32, {1, 1, 1, 4});
    Tensor out(DType::kF32, {1, 1, 1, 4});
    error_of([&] { append_and_attend(own, cache, q, some, some, {}, out); },
             ErrorCode::kCommunication);
    EXPECT_EQ(cache.length(), 600);
    EXPECT_EQ(cache.local().length(), is_first ? 512 : 88);
    EXPECT_EQ(communicator.broken(), "");
    append_and_attend(own, cache, q, q, q, {}, out);
    EXPECT_EQ(cache.length(), 601);
    EXPECT_EQ(error_of([&] { cache.truncate(0, 602); }),
              "SpreadKvCache::truncate: length: got 602, expected 0 to 601");
    cache.truncate(0, 0);
    spread_attention(own, cache, q, {}, out);  // over no keys
    EXPECT_EQ(out.data_as<float>()[0], 0);
  }));
}

}  // namespace
}  // namespace ladon::test
