// A sequence in chunks through a cache gives what it gives at once: every kind of cache, storage
// and page size, for MHA, GQA and MQA, in ragged batches, after truncate, fork, reorder, save and
// load.

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cache/cache_support.h"
#include "ladon/multi_head_attention.h"
#include "support/contexts.h"
#include "support/temp_folder.h"

namespace ladon::test {
namespace {

constexpr std::int64_t kEmbed = 24;
constexpr std::int64_t kWindow = 9;
const std::vector<std::int64_t> kLengths = {37, 20, 1};

/// How much an f32 layer's output may move when its cache is stored in a dtype, as a share of the
/// largest output.
double storage_bound(DType dtype) {
  switch (dtype) {
    case DType::kF32: return 1e-5;
    case DType::kF16: return 2e-3;
    case DType::kBF16: return 1.6e-2;
    case DType::kF8E4M3: return 0.1;
    default: return 2e-2;  // i8
  }
}

/// The sequences of a batch, each [length, embed], and their outputs without a cache.
struct Sequences {
  std::vector<Tensor> x, truth;
};

Sequences sequences_of(const Context& context, const MultiHeadAttention& layer) {
  Sequences all;
  for (std::size_t b = 0; b < kLengths.size(); ++b) {
    all.x.push_back(random_tensor(context, layer.dtype(), {kLengths[b], kEmbed}, b));
    all.truth.push_back(layer.forward(context, all.x.back()));
  }
  return all;
}

/// One call with the next counts[b] tokens of each sequence, padded or packed. Padding is NaN.
void step(const Context& context, const MultiHeadAttention& layer, const Sequences& all,
          KvCache& cache, const std::vector<std::int64_t>& counts, bool packed,
          std::vector<Tensor>& outs) {
  const auto batch = static_cast<std::int64_t>(counts.size());
  const std::int64_t longest = *std::max_element(counts.begin(), counts.end());
  std::int64_t total = 0;
  for (const std::int64_t count : counts) total += count;
  Tensor x =
      poisoned(context, layer.dtype(), packed ? Dims{total, kEmbed} : Dims{batch, longest, kEmbed});
  const auto rows_of = [&](Tensor& tensor, std::int64_t b, std::int64_t begin) {
    const std::int64_t count = counts[static_cast<std::size_t>(b)];
    return packed ? tensor.view().slice(0, begin, begin + count)
                  : tensor.view().select(0, b).slice(0, 0, count);
  };
  std::vector<std::int64_t> starts;
  std::int64_t row = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    starts.push_back(cache.length(b));
    copy(context, all.x[i].view().slice(0, starts[i], starts[i] + counts[i]), rows_of(x, b, row));
    row += counts[i];
  }
  Tensor out = layer.forward(context, x, cache, {.new_lengths = counts});
  row = 0;
  for (std::int64_t b = 0; b < batch; ++b) {
    const auto i = static_cast<std::size_t>(b);
    EXPECT_EQ(cache.length(b), starts[i] + counts[i]);
    copy(context, rows_of(out, b, row), outs[i].view().slice(0, starts[i], starts[i] + counts[i]));
    row += counts[i];
  }
}

/// All sequences from where the cache stands to their ends, in chunks of up to `most` tokens.
/// `between` runs after each call.
void run_chunks(
    const Context& context, const MultiHeadAttention& layer, const Sequences& all, KvCache& cache,
    std::int64_t most, Random& random, std::vector<Tensor>& outs,
    const std::function<void()>& between = [] {}) {
  for (bool packed = false;; packed = !packed) {
    std::vector<std::int64_t> counts;
    bool left = false;
    for (std::size_t b = 0; b < all.x.size(); ++b) {
      const std::int64_t rest = all.x[b].size(0) - cache.length(static_cast<std::int64_t>(b));
      left = left || rest > 0;
      counts.push_back(std::min(rest, most == 1 ? 1 : random.below(most + 1)));
    }
    if (!left) return;
    step(context, layer, all, cache, counts, packed, outs);
    between();
  }
}

std::vector<Tensor> empty_outs(const Context& context, const Sequences& all) {
  std::vector<Tensor> outs;
  for (const Tensor& truth : all.truth) outs.emplace_back(context, truth.dtype(), truth.shape());
  return outs;
}

void expect_near(const std::vector<Tensor>& outs, const std::vector<Tensor>& truth, double bound,
                 const std::string& label) {
  for (std::size_t b = 0; b < outs.size(); ++b) {
    EXPECT_LE(relative_difference(outs[b], truth[b]), bound) << label << ", sequence " << b;
  }
}

std::string label_of(const CacheKind& kind, DType dtype, std::int64_t kv_heads) {
  return kind.name + " page " + std::to_string(kind.page_size) + " " + name_of(dtype) +
         " kv_heads " + std::to_string(kv_heads);
}

class CacheChunks : public ContextTest {
 protected:
  MultiHeadAttention make_layer(std::int64_t kv_heads, bool window,
                                DType dtype = DType::kF32) const {
    MultiHeadAttentionOptions options{.embed_dim = kEmbed,
                                      .num_heads = 4,
                                      .num_kv_heads = kv_heads,
                                      .head_dim = 10,
                                      .value_bias = true,
                                      .out_bias = true,
                                      .causal = true,
                                      .rope = RopeOptions{},
                                      .qk_norm = true,
                                      .sinks = true,
                                      .dtype = dtype};
    if (window) options.window_left = kWindow;
    return there(MultiHeadAttention(options, 5));
  }
  /// Runs `body` for every kind, storage and number of KV heads.
  void for_every_cache(const std::function<void(const MultiHeadAttention&, const CacheKind&,
                                                const KvCacheOptions&)>& body) const {
    std::vector<CacheKind> kinds = unlimited_kinds();
    kinds.push_back({"window", 0, kWindow});
    for (const std::int64_t kv_heads : {4, 2, 1}) {
      for (const CacheKind& kind : kinds) {
        const MultiHeadAttention layer = make_layer(kv_heads, kind.name == "window");
        for (const DType dtype : kStorages) {
          SCOPED_TRACE(label_of(kind, dtype, kv_heads));
          body(layer, kind, layer.cache_options(static_cast<std::int64_t>(kLengths.size()), dtype));
        }
      }
    }
  }
  KvCache cache_of(const CacheKind& kind, const KvCacheOptions& options) const {
    return make_cache(context_, kind, options);
  }
};

TEST_P(CacheChunks, AnySplitGivesTheWholeSequencesAnswer) {
  for_every_cache(
      [&](const MultiHeadAttention& layer, const CacheKind& kind, const KvCacheOptions& options) {
        const Sequences all = sequences_of(context_, layer);
        Random random(3);
        std::vector<Tensor> at_once;
        for (const std::int64_t most : {1000, 1, 3, 12}) {
          KvCache cache = cache_of(kind, options);
          std::vector<Tensor> outs = empty_outs(context_, all);
          if (most == 1000) {
            step(context_, layer, all, cache, kLengths, false, outs);
          } else {
            run_chunks(context_, layer, all, cache, most, random, outs,
                       [&] { poison_dead_slots(context_, {&cache}); });
          }
          expect_near(outs, all.truth, storage_bound(options.format.dtype),
                      "chunks of " + std::to_string(most));
          // Whatever the storage rounds, it rounds alike for every split.
          if (most == 1000)
            at_once = std::move(outs);
          else
            expect_near(outs, at_once, 1e-5, "against one chunk, " + std::to_string(most));
        }
      });
}

TEST_P(CacheChunks, TruncateForkReorderSaveAndLoadChangeNothing) {
  const TempFolder folder;
  for_every_cache(
      [&](const MultiHeadAttention& layer, const CacheKind& kind, const KvCacheOptions& options) {
        const Sequences all = sequences_of(context_, layer);
        const double bound = storage_bound(options.format.dtype);
        Random random(4);
        KvCache cache = cache_of(kind, options);
        std::vector<Tensor> outs = empty_outs(context_, all);
        const auto drafts = [&] {  // tokens that are taken back
          const Tensor x = random_tensor(context_, DType::kF32, {cache.batch(), 3, kEmbed}, 50);
          layer.forward(context_, x, cache);
          for (std::int64_t b = 0; b < cache.batch(); ++b) cache.truncate(b, cache.length(b) - 3);
        };
        step(context_, layer, all, cache, {11, 20, 1}, false, outs);
        drafts();
        step(context_, layer, all, cache, {4, 0, 0}, true, outs);
        // Two forks go on from here, one of them with other tokens.
        KvCache other = cache.fork(context_);
        const Tensor noise = random_tensor(context_, DType::kF32, {3, 5, kEmbed}, 51);
        layer.forward(context_, noise, other);
        step(context_, layer, all, cache, {3, 0, 0}, false, outs);
        cache.save(context_, folder / "cache");
        cache.reset();
        drafts();
        cache.load(context_, folder / "cache");
        // There and back again.
        cache.reorder(context_, std::vector<std::int64_t>{2, 0, 1, 0});
        EXPECT_EQ(cache.batch(), 4);
        cache.reorder(context_, std::vector<std::int64_t>{1, 2, 0});
        run_chunks(context_, layer, all, cache, 5, random, outs);
        expect_near(outs, all.truth, bound, "after operations");
        // The fork had its own tokens all along.
        KvCache again = cache_of(kind, options);
        std::vector<Tensor> unused = empty_outs(context_, all);
        step(context_, layer, all, again, {15, 20, 1}, false, unused);
        layer.forward(context_, noise, again);
        const Tensor probe = random_tensor(context_, DType::kF32, {3, 1, kEmbed}, 52);
        const Tensor by_fork = layer.forward(context_, probe, other);
        const Tensor by_again = layer.forward(context_, probe, again);
        EXPECT_LE(relative_difference(by_fork, by_again), 1e-5);
      });
}

TEST_P(CacheChunks, ContiguousAndPagedGiveTheSameBits) {
  for (const std::int64_t kv_heads : {4, 2, 1}) {
    const MultiHeadAttention layer = make_layer(kv_heads, false);
    const Sequences all = sequences_of(context_, layer);
    std::vector<Tensor> first;
    for (const CacheKind& kind : unlimited_kinds()) {
      Random random(9);  // the same chunks for each
      KvCache cache = cache_of(kind, layer.cache_options(3));
      std::vector<Tensor> outs = empty_outs(context_, all);
      run_chunks(context_, layer, all, cache, 6, random, outs);
      if (first.empty()) {
        first = std::move(outs);
        continue;
      }
      for (std::size_t b = 0; b < outs.size(); ++b) {
        EXPECT_TRUE(same_bits(outs[b].view(), first[b].view()))
            << label_of(kind, DType::kF32, kv_heads);
      }
    }
  }
}

TEST_P(CacheChunks, EveryStorageServesEveryQueryDType) {
  for (const DType dtype : {DType::kF64, DType::kF16, DType::kBF16}) {
    const MultiHeadAttention layer = make_layer(2, false, dtype);
    const Sequences all = sequences_of(context_, layer);
    const double own = dtype == DType::kF64 ? 1e-12 : dtype == DType::kF16 ? 5e-3 : 4e-2;
    std::vector<DType> storages(std::begin(kStorages), std::end(kStorages));
    if (dtype == DType::kF64) storages.push_back(dtype);
    for (const DType storage : storages) {
      for (const CacheKind& kind : unlimited_kinds()) {
        KvCache cache = cache_of(kind, layer.cache_options(3, storage));
        std::vector<Tensor> outs = empty_outs(context_, all);
        Random random(2);
        run_chunks(context_, layer, all, cache, 8, random, outs);
        const double bound = own + (storage == DType::kF64 ? 0 : storage_bound(storage));
        expect_near(outs, all.truth, bound,
                    label_of(kind, storage, 2) + " under " + name_of(dtype));
      }
    }
  }
}

TEST_P(CacheChunks, WindowCacheHoldsTheWindowAndNoMore) {
  const MultiHeadAttention layer = make_layer(2, true);
  KvCache cache = KvCache::window(context_, layer.cache_options(), kWindow);
  const std::int64_t reserved = cache.bytes_reserved();
  EXPECT_EQ(reserved, (kWindow + 1) * 2 * 2 * 10 * 4);
  const Tensor x = random_tensor(context_, DType::kF32, {300, kEmbed}, 8);
  const Tensor truth = layer.forward(context_, x);
  Tensor out(context_, DType::kF32, {300, kEmbed});
  for (std::int64_t t = 0; t < 300; ++t) {
    layer.forward(context_, x.view().slice(0, t, t + 1), cache, {}, out.view().slice(0, t, t + 1));
    EXPECT_EQ(cache.held(), std::min<std::int64_t>(t + 1, kWindow));
    EXPECT_EQ(cache.bytes_reserved(), reserved);
  }
  EXPECT_EQ(cache.length(), 300);
  EXPECT_LE(relative_difference(out, truth), 1e-5);
}

TEST_P(CacheChunks, TheFunctionalFormLeavesThePastAlone) {
  for (const CacheKind& kind : unlimited_kinds()) {
    const MultiHeadAttention layer = make_layer(2, false);
    const Tensor x = random_tensor(context_, DType::kF32, {12, kEmbed}, 8);
    const Tensor truth = layer.forward(context_, x);
    KvCache empty = cache_of(kind, layer.cache_options());
    empty.reserve(context_, 64);
    CachedForward first = layer.forward_from(context_, x.view().slice(0, 0, 5), empty);
    EXPECT_EQ(empty.length(), 0);
    const CacheState before = state_of(context_, first.cache);
    const CachedForward second =
        layer.forward_from(context_, x.view().slice(0, 5, 12), first.cache);
    EXPECT_EQ(state_of(context_, first.cache), before);
    EXPECT_LE(
        relative_difference(second.out, Tensor::copy_of(context_, truth.view().slice(0, 5, 12))),
        1e-5);
    // What both hold is in the same slots of the same memory.
    const KvCacheView a = first.cache.view();
    const KvCacheView b = second.cache.view();
    EXPECT_EQ(a.k, b.k);
    for (std::int64_t j = 0; j < 5; ++j) {
      EXPECT_EQ(slot_in(a, a.sequences[0], j), slot_in(b, b.sequences[0], j)) << kind.name;
    }
    // A second future of the same past.
    const CachedForward third = layer.forward_from(context_, x.view().slice(0, 5, 12), first.cache);
    EXPECT_TRUE(same_bits(third.out.view(), second.out.view()));
  }
}

LADON_FOR_EACH_CONTEXT(CacheChunks);

}  // namespace
}  // namespace ladon::test
