// Conversions that are exact: known answers, and controls that are not.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "convert/convert_support.h"
#include "ladon/alibi.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::difference;
using test::error_of;
using test::host_context;
using test::random_layer;
using test::random_tensor;

MultiHeadAttentionOptions options_of(std::int64_t num_kv_heads) {
  return {.embed_dim = 20,
          .num_heads = 4,
          .num_kv_heads = num_kv_heads,
          .head_dim = 6,
          .causal = true,
          .dtype = DType::kF64};
}

struct Variant {
  std::string name;
  MultiHeadAttentionOptions options;
};

/// Ropes of all kinds, with and without biases.
std::vector<Variant> variants(std::int64_t num_kv_heads) {
  std::vector<Variant> all;
  const auto add = [&](std::string name, auto&& change) {
    MultiHeadAttentionOptions options = options_of(num_kv_heads);
    change(options);
    all.push_back({std::move(name), options});
  };
  using Options = MultiHeadAttentionOptions;
  add("no rope", [](Options&) {});
  add("half-split", [](Options& o) { o.rope = RopeOptions{}; });
  add("interleaved, biases", [](Options& o) {
    o.rope = RopeOptions{.layout = RopeLayout::kInterleaved};
    o.query_bias = o.key_bias = o.value_bias = o.out_bias = true;
  });
  add("partial, key bias, own scale", [](Options& o) {
    o.rope = RopeOptions{.rotary_dim = 4};
    o.key_bias = true;
    o.scale = 0.7;
  });
  add("llama3, not causal", [](Options& o) {
    o.rope =
        RopeOptions{.scaling = {.kind = RopeScaling::kLlama3, .factor = 4, .original_context = 16}};
    o.causal = false;
  });
  add("yarn, partial interleaved, value bias", [](Options& o) {
    o.rope =
        RopeOptions{.layout = RopeLayout::kInterleaved,
                    .rotary_dim = 4,
                    .scaling = {.kind = RopeScaling::kYarn, .factor = 4, .original_context = 16}};
    o.value_bias = true;
  });
  add("explicit frequencies", [](Options& o) {
    o.rope = RopeOptions{.frequencies = {0.4, 0, 0.05}, .magnitude = 1.3};
  });
  return all;
}

void expect_same_bits(const MultiHeadAttention& a, const MultiHeadAttention& b) {
  ASSERT_EQ(a.named_parameters().size(), b.named_parameters().size());
  for (const Parameter& parameter : a.named_parameters()) {
    const Tensor& other = b.parameter(parameter.name).value;
    ASSERT_EQ(parameter.value.shape(), other.shape()) << parameter.name;
    const auto* const x = parameter.value.data_as<double>();
    EXPECT_TRUE(std::equal(x, x + other.num_elements(), other.data_as<double>())) << parameter.name;
  }
}

// ---- Repetition --------------------------------------------------------------------------------

TEST(Repeat, GoesThereAndBackBitByBit) {
  for (const std::int64_t kv_heads : {1, 2}) {
    for (const Variant& variant : variants(kv_heads)) {
      SCOPED_TRACE(variant.name);
      const auto layer = random_layer(MultiHeadAttention(variant.options), 1);
      const Tensor x = random_tensor({2, 7, 20}, 2);
      const MultiHeadAttention whole = to_mha(host_context(), layer);
      EXPECT_TRUE(whole.is_mha());
      EXPECT_LT(difference(layer, whole, x), 1e-15);
      const auto back = to_gqa(host_context(), whole, {.num_kv_heads = kv_heads});
      EXPECT_TRUE(back.summary.exact);
      EXPECT_EQ(back.summary.cache_before, 48);
      EXPECT_EQ(back.summary.cache_after, 12 * kv_heads);
      expect_same_bits(back.layer, layer);
    }
  }
  const auto one = random_layer(MultiHeadAttention(options_of(1)), 1);
  const auto two = to_gqa(host_context(), one, {.num_kv_heads = 2});
  EXPECT_TRUE(two.summary.exact);
  EXPECT_LT(difference(one, two.layer, random_tensor({1, 5, 20}, 2)), 1e-15);
}

TEST(Repeat, NormsOverAllHeadsAreRepeatedAndNotMerged) {
  MultiHeadAttentionOptions options = options_of(2);
  options.qk_norm = true;
  options.qk_norm_span = QkNormSpan::kAllHeads;
  const auto layer = random_layer(MultiHeadAttention(options), 1);
  const MultiHeadAttention whole = to_mha(host_context(), layer);
  EXPECT_LT(difference(layer, whole, random_tensor({2, 7, 20}, 2)), 1e-14);
  EXPECT_EQ(error_of([&] { to_gqa(host_context(), layer, {.num_kv_heads = 1}); },
                     ErrorCode::kUnsupported),
            "to_gqa: qk_norm_span: got a norm over all heads, expected one of each head: fewer "
            "heads have another norm");
}

// ---- Heads that are copies ---------------------------------------------------------------------

/// The source heads that share a KV head, for each KV head.
std::set<std::set<std::int64_t>> groups_of(const ConvertedMultiHead& converted) {
  std::set<std::set<std::int64_t>> groups;
  const auto size =
      static_cast<std::size_t>(converted.layer.num_heads() / converted.layer.num_kv_heads());
  const auto& order = converted.summary.head_order;
  for (std::size_t n = 0; n < order.size(); n += size) {
    groups.emplace(order.begin() + static_cast<std::ptrdiff_t>(n),
                   order.begin() + static_cast<std::ptrdiff_t>(n + size));
  }
  return groups;
}

TEST(ToGqa, FindsPermutedCopiesUpToGauge) {
  // Heads 0 and 1, 2 and 3 share a KV head; then 0 and 2, 1 and 3 do.
  const std::vector<std::int64_t> order = {0, 2, 1, 3};
  const std::set<std::set<std::int64_t>> expected = {{0, 2}, {1, 3}};
  for (Variant variant : variants(2)) {
    SCOPED_TRACE(variant.name);
    variant.options.sinks = true;
    variant.options.alibi_slopes = alibi_slopes(4);
    const auto layer = random_layer(MultiHeadAttention(variant.options), 3);
    MultiHeadAttention mixed = test::with_order(to_mha(host_context(), layer), order);
    test::Numbers numbers(4);
    test::apply_gauge(mixed, numbers);
    const Tensor x = random_tensor({2, 9, 20}, 5);
    ASSERT_LT(difference(layer, mixed, x), 1e-12);  // the gauge changes nothing

    const auto converted = to_gqa(host_context(), mixed, {.num_kv_heads = 2});
    EXPECT_TRUE(converted.summary.exact);
    EXPECT_LT(converted.summary.discarded, 1e-13);
    EXPECT_EQ(groups_of(converted), expected);
    const auto loss =
        compare_layers(host_context(), mixed, converted.layer, x, converted.summary.head_order);
    EXPECT_LT(loss.output_error, 1e-10);
    EXPECT_LT(loss.weights_divergence, 1e-10);
    EXPECT_EQ(loss.cache_before, 48);
    EXPECT_EQ(loss.cache_after, 24);

    // Controls: other methods and groups do not find it.
    for (const GqaConversion& other :
         {GqaConversion{.num_kv_heads = 2, .merge = HeadMerge::kMean},
          GqaConversion{.num_kv_heads = 2, .merge = HeadMerge::kFirst},
          GqaConversion{.num_kv_heads = 2, .grouping = HeadGrouping::kConsecutive},
          GqaConversion{.num_kv_heads = 1}}) {
      const auto worse = to_gqa(host_context(), mixed, other);
      EXPECT_FALSE(worse.summary.exact);
      EXPECT_GT(difference(mixed, worse.layer, x), 0.05);
    }
  }
}

// ---- As latent attention -----------------------------------------------------------------------

/// Every form of a latent layer against the layer it came from, cached and not.
void expect_same_function(const MultiHeadAttention& layer, LatentAttention latent,
                          const Tensor& x) {
  for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
    latent.set_form(form);
    EXPECT_LT(difference(layer, latent, x), 1e-12);
    if (!layer.options().causal) continue;
    KvCache cache = KvCache::contiguous(host_context(), latent.cache_options(x.size(0)));
    KvCache plain = KvCache::contiguous(host_context(), layer.cache_options(x.size(0)));
    for (std::int64_t t = 0; t < x.size(1); t += 3) {
      const ConstTensorView chunk = x.view().slice(1, t, std::min(t + 3, x.size(1)));
      const Tensor got = latent.forward(host_context(), chunk, cache);
      const Tensor expected = layer.forward(host_context(), chunk, plain);
      for (std::int64_t i = 0; i < got.num_elements(); ++i) {
        EXPECT_NEAR(got.data_as<double>()[i], expected.data_as<double>()[i], 1e-12);
      }
    }
  }
}

TEST(ToMla, IsExactWhereNothingIsLeftOut) {
  for (const std::int64_t kv_heads : {1, 2, 4}) {
    for (const Variant& variant : variants(kv_heads)) {
      SCOPED_TRACE(variant.name + ", " + std::to_string(kv_heads) + " KV heads");
      const auto layer = random_layer(MultiHeadAttention(variant.options), 6);
      const Tensor x = random_tensor({2, 7, 20}, 7);
      const auto converted = to_mla(host_context(), layer);
      EXPECT_TRUE(converted.summary.exact);
      EXPECT_EQ(converted.summary.rope_discarded, 0);
      EXPECT_LE(converted.layer.latent_dim(), 12 * kv_heads);
      EXPECT_EQ(converted.summary.cache_after, converted.layer.latent_dim());
      expect_same_function(layer, converted.layer, x);
      // A calibration does not change an exact conversion's function.
      Calibration calibration(20);
      calibration.add(host_context(), random_tensor({3, 7, 20}, 8));
      expect_same_function(layer, to_mla(host_context(), layer, {}, &calibration).layer, x);
    }
  }
}

TEST(ToMla, TakesRopeOffPairsThatDoNotRotate) {
  MultiHeadAttentionOptions options = options_of(2);
  options.rope = RopeOptions{.frequencies = {0, 0.4, 0}};
  const auto layer = random_layer(MultiHeadAttention(options), 9);
  const Tensor x = random_tensor({1, 8, 20}, 10);
  for (const RopeChoice choice : {RopeChoice::kScoreError, RopeChoice::kEnergy}) {
    const auto converted = to_mla(host_context(), layer, {.rope_dim = 4, .choice = choice});
    EXPECT_TRUE(converted.summary.exact);
    EXPECT_EQ(converted.layer.options().rope.frequencies, (std::vector<double>{0.4, 0.4}));
    EXPECT_LT(difference(layer, converted.layer, x), 1e-12);
  }
  // One component fewer is not exact, and says so.
  const auto less = to_mla(host_context(), layer, {.rope_dim = 2});
  EXPECT_FALSE(less.summary.exact);
  EXPECT_GT(less.summary.rope_discarded, 1e-3);
  EXPECT_GT(difference(layer, less.layer, x), 1e-3);
}

// ---- From latent attention ---------------------------------------------------------------------

std::vector<LatentAttentionOptions> latent_variants() {
  const LatentAttentionOptions plain{.embed_dim = 20,
                                     .num_heads = 3,
                                     .kv_rank = 9,
                                     .nope_dim = 6,
                                     .rope_dim = 4,
                                     .value_dim = 5,
                                     .query_norm = false,
                                     .kv_norm = false,
                                     .causal = true,
                                     .dtype = DType::kF64};
  std::vector<LatentAttentionOptions> all(5, plain);
  all[1].query_rank = 7;
  all[1].query_bias = all[1].kv_bias = all[1].out_bias = true;
  all[2].rope_dim = 0;
  all[2].value_dim = 8;
  all[3].rope.layout = RopeLayout::kHalfSplit;
  all[3].value_dim = 16;
  all[3].query_bias = true;
  all[4].rope.scaling = {.kind = RopeScaling::kYarn,
                         .factor = 4,
                         .original_context = 16,
                         .mscale = 0.7,
                         .mscale_all_dim = 0.8};
  return all;
}

TEST(FromLatent, IsTheSameFunction) {
  const Tensor x = random_tensor({2, 7, 20}, 11);
  for (const LatentAttentionOptions& options : latent_variants()) {
    const auto layer = random_layer(LatentAttention(options), 12);
    EXPECT_LT(difference(layer, to_mha(host_context(), layer), x), 1e-12);
    const MultiHeadAttention mqa = to_mqa(host_context(), layer);
    EXPECT_TRUE(mqa.is_mqa());
    EXPECT_LT(difference(layer, mqa, x), 1e-12);
  }
}

TEST(ReduceRank, FindsTheNumericalRank) {
  const Tensor x = random_tensor({2, 7, 20}, 13);
  for (const LatentAttentionOptions& options : latent_variants()) {
    auto layer = random_layer(LatentAttention(options), 14);
    // Latent elements 4 to 8 become sums of the others.
    test::change_rows(layer, "kv_a_proj_with_mqa", [](test::Rows& rows) {
      for (std::int64_t n = 4; n < 9; ++n) {
        for (std::int64_t c = 0; c < rows.columns; ++c) {
          rows(n, c) = rows(n - 4, c) - 0.5 * rows((n - 3) % 4, c);
        }
      }
    });
    const auto reduced = reduce_rank(host_context(), layer);
    EXPECT_EQ(reduced.layer.kv_rank(), 4);
    EXPECT_TRUE(reduced.summary.exact);
    EXPECT_EQ(reduced.summary.cache_after, 4 + options.rope_dim);
    EXPECT_LT(difference(layer, reduced.layer, x), 1e-12);
    EXPECT_TRUE(reduce_rank(host_context(), layer, 4).summary.exact);
    const auto less = reduce_rank(host_context(), layer, 3);
    EXPECT_FALSE(less.summary.exact);
    EXPECT_GT(less.summary.discarded, 1e-4);
    EXPECT_GT(difference(layer, less.layer, x), 1e-3);
  }
}

// ---- Refusals ----------------------------------------------------------------------------------

TEST(ConvertErrors, NormsAreNotLinear) {
  const std::string why =
      ": got true, expected false: behind a norm the heads are not linear in "
      "the input";
  LatentAttentionOptions options = latent_variants()[0];
  options.kv_norm = true;
  const LatentAttention normed(options);
  const auto code = ErrorCode::kUnsupported;
  EXPECT_EQ(error_of([&] { to_mha(host_context(), normed); }, code), "to_mha: kv_norm" + why);
  EXPECT_EQ(error_of([&] { to_mqa(host_context(), normed); }, code), "to_mqa: kv_norm" + why);
  EXPECT_EQ(error_of([&] { reduce_rank(host_context(), normed); }, code),
            "reduce_rank: kv_norm" + why);
  options = latent_variants()[1];
  options.query_norm = true;
  EXPECT_EQ(error_of([&] { to_mha(host_context(), LatentAttention(options)); }, code),
            "to_mha: query_norm" + why);
}

TEST(ConvertErrors, WhatLatentAttentionDoesNotHave) {
  const auto refuse = [](auto&& change, const std::string& message) {
    MultiHeadAttentionOptions options = options_of(2);
    change(options);
    const MultiHeadAttention layer(options);
    EXPECT_EQ(error_of([&] { to_mla(host_context(), layer); }, ErrorCode::kUnsupported),
              "to_mla: " + message);
  };
  const std::string why = ": latent attention does not have it";
  using Options = MultiHeadAttentionOptions;
  refuse([](Options& o) { o.qk_norm = true; }, "qk_norm: got true, expected false" + why);
  refuse([](Options& o) { o.softcap = 2; }, "softcap: got 2, expected 0" + why);
  refuse([](Options& o) { o.window_left = 3; }, "window_left: got 3, expected none" + why);
  refuse([](Options& o) { o.window_right = 3; }, "window_right: got 3, expected none" + why);
  refuse([](Options& o) { o.alibi_slopes = alibi_slopes(4); },
         "alibi_slopes: got slopes, expected none" + why);
  refuse([](Options& o) { o.sinks = true; }, "sinks: got true, expected false" + why);
  refuse([](Options& o) { o.key_dim = 9; },
         "key_dim: got 9, expected embed_dim = 20: only self-attention is converted");
}

TEST(ConvertErrors, SizesThatDoNotFit) {
  MultiHeadAttentionOptions options = options_of(2);
  options.rope = RopeOptions{};
  const MultiHeadAttention layer(options);
  for (const std::int64_t bad : {0, -1, 3, 8}) {
    EXPECT_EQ(error_of([&] { to_gqa(host_context(), layer, {.num_kv_heads = bad}); }),
              "to_gqa: num_kv_heads: got " + std::to_string(bad) +
                  ", expected a divisor of num_heads = 4 that divides the layer's 2 KV heads or is "
                  "a multiple of them");
  }
  for (const std::int64_t bad : {-2, 3, 14}) {
    EXPECT_EQ(error_of([&] { to_mla(host_context(), layer, {.rope_dim = bad}); }),
              "to_mla: rope_dim: got " + std::to_string(bad) +
                  ", expected an even number from 0 to 12, the rotated elements of all KV heads");
  }
  for (const std::int64_t bad : {0, 13}) {
    EXPECT_EQ(error_of([&] { to_mla(host_context(), layer, {.kv_rank = bad}); }),
              "to_mla: kv_rank: got " + std::to_string(bad) +
                  ", expected 1 to 12, the keys without rope and the values");
  }
  EXPECT_EQ(error_of([&] { to_mla(host_context(), layer, {.context = -1}); }),
            "to_mla: context: got -1, expected 0 to 16777216");
  EXPECT_EQ(
      error_of([&] { to_mla(host_context(), layer, {.choice = static_cast<RopeChoice>(9)}); }),
      "to_mla: choice: got 9, expected a RopeChoice");
  EXPECT_EQ(error_of([&] {
              to_gqa(host_context(), layer,
                     {.num_kv_heads = 1, .merge = static_cast<HeadMerge>(7)});
            }),
            "to_gqa: merge: got 7, expected a HeadMerge");
  const LatentAttention latent(latent_variants()[0]);
  EXPECT_EQ(error_of([&] { reduce_rank(host_context(), latent, 10); }),
            "reduce_rank: kv_rank: got 10, expected 0 to 9, the layer's own");
  options.qk_norm = true;
  const MultiHeadAttention normed(options);
  EXPECT_EQ(error_of([&] { to_gqa(host_context(), normed, {.num_kv_heads = 1}); },
                     ErrorCode::kUnsupported),
            "to_gqa: qk_norm: got true, expected false: keys behind a norm are not linear in the "
            "input, and only the mean of heads or the first of them can stand for a group");
  const Tensor x = random_tensor({1, 6, 20}, 15);
  const auto mean = to_gqa(host_context(), normed, {.num_kv_heads = 1, .merge = HeadMerge::kMean});
  EXPECT_FALSE(mean.summary.exact);
  EXPECT_GT(difference(normed, mean.layer, x), 1e-3);
}

}  // namespace
}  // namespace ladon
