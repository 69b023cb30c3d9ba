// Conversions with a loss: planted structure whose loss is known, orders that must hold on the
// inputs that were calibrated on, the refit of the output projection, and the measures themselves.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "convert/convert_support.h"
#include "support/error_of.h"

namespace ladon {
namespace {

using test::difference;
using test::error_of;
using test::host_context;
using test::random_layer;
using test::random_tensor;

MultiHeadAttentionOptions mha_options() {
  return {.embed_dim = 24,
          .num_heads = 4,
          .head_dim = 6,
          .causal = true,
          .rope = RopeOptions{.base = 50},
          .dtype = DType::kF64};
}

Calibration calibrate(const Tensor& x) {
  Calibration calibration(x.size(x.rank() - 1));
  calibration.add(host_context(), x);
  return calibration;
}

/// Rows of `to` as a random mix of `rank` random rows.
void plant_rank(AttentionLayer& layer, const std::string& name, std::int64_t rank,
                std::uint64_t seed) {
  Tensor& weight = layer.parameter(name).value;
  const Tensor left = random_tensor({weight.size(0), rank}, seed);
  const Tensor right = random_tensor({rank, weight.size(1)}, seed + 1);
  for (std::int64_t r = 0; r < weight.size(0); ++r) {
    for (std::int64_t c = 0; c < weight.size(1); ++c) {
      double sum = 0;
      for (std::int64_t n = 0; n < rank; ++n) {
        sum +=
            left.data_as<double>()[r * rank + n] * right.data_as<double>()[n * weight.size(1) + c];
      }
      weight.data_as<double>()[r * weight.size(1) + c] = 0.2 * sum;
    }
  }
}

TEST(ToMla, FindsAPlantedRank) {
  MultiHeadAttention layer = random_layer(MultiHeadAttention(mha_options()), 1);
  plant_rank(layer, "v_proj.weight", 5, 20);
  const Tensor x = random_tensor({2, 9, 24}, 2);
  EXPECT_EQ(to_mla(host_context(), layer).layer.kv_rank(), 5);
  const auto exact = to_mla(host_context(), layer, {.kv_rank = 5});
  EXPECT_TRUE(exact.summary.exact);
  EXPECT_LT(exact.summary.discarded, 1e-13);
  EXPECT_LT(difference(layer, exact.layer, x), 1e-10);
  ASSERT_EQ(exact.summary.spectrum.size(), 24u);

  // One less leaves out exactly the fifth component, and says how much that is.
  const auto less = to_mla(host_context(), layer, {.kv_rank = 4});
  EXPECT_FALSE(less.summary.exact);
  EXPECT_NEAR(less.summary.discarded, exact.summary.spectrum[4], 1e-12);
  EXPECT_GT(less.summary.discarded, 1e-4);
  EXPECT_GT(difference(layer, less.layer, x), 1e-3);
}

TEST(ToMla, FitsTheSubspaceOfTheInputs) {
  // Inputs in 7 of 24 dimensions: a latent of 7 has all that there is, though the weights have full
  // rank. Without a calibration it cannot be known.
  const MultiHeadAttention layer = random_layer(MultiHeadAttention(mha_options()), 3);
  MultiHeadAttention mix({.embed_dim = 24, .num_heads = 1, .dtype = DType::kF64});
  plant_rank(mix, "v_proj.weight", 7, 30);
  Tensor inputs(DType::kF64, {4, 10, 24});
  const Tensor noise = random_tensor({40, 24}, 32);
  for (std::int64_t t = 0; t < 40; ++t) {
    for (std::int64_t r = 0; r < 24; ++r) {
      double sum = 0;
      for (std::int64_t c = 0; c < 24; ++c) {
        sum += mix.parameter("v_proj.weight").value.data_as<double>()[r * 24 + c] *
               noise.data_as<double>()[t * 24 + c];
      }
      inputs.data_as<double>()[t * 24 + r] = sum;
    }
  }
  const Calibration calibration = calibrate(inputs);
  const MlaConversion conversion{.kv_rank = 7};
  const auto fitted = to_mla(host_context(), layer, conversion, &calibration);
  EXPECT_FALSE(fitted.summary.exact);  // for these inputs alone
  EXPECT_LT(difference(layer, fitted.layer, inputs), 1e-6);
  EXPECT_GT(difference(layer, to_mla(host_context(), layer, conversion).layer, inputs), 0.01);
}

TEST(ToMla, KeepsThePairsWhosePositionsMatter) {
  // Only pair 1 of all heads carries large scores, and pair 2 is too slow to matter in 8 positions.
  MultiHeadAttentionOptions options = mha_options();
  options.num_kv_heads = 2;
  options.rope.emplace().frequencies = {0.9, 0.5, 1e-6};
  MultiHeadAttention layer = random_layer(MultiHeadAttention(options), 4);
  test::change_rows(layer, "k_proj", [](test::Rows& rows) {
    for (std::int64_t row = 0; row < 12; ++row) {
      const double factor = row % 3 == 0 ? 0.01 : row % 3 == 1 ? 1 : 3;
      for (std::int64_t c = 0; c < rows.columns; ++c) rows(row, c) *= factor;
    }
  });
  const Tensor x = random_tensor({3, 8, 24}, 5);
  const Calibration calibration = calibrate(x);
  const auto chosen = to_mla(host_context(), layer, {.rope_dim = 4}, &calibration);
  EXPECT_EQ(chosen.layer.options().rope.frequencies, (std::vector<double>{0.5, 0.5}));
  const double error = difference(layer, chosen.layer, x);
  EXPECT_LT(error, 0.02);
  const auto by_energy =
      to_mla(host_context(), layer, {.rope_dim = 4, .choice = RopeChoice::kEnergy}, &calibration);
  EXPECT_EQ(by_energy.layer.options().rope.frequencies, (std::vector<double>{1e-6, 1e-6}));
  EXPECT_GT(difference(layer, by_energy.layer, x), 2 * error);
  const auto each = to_mla(host_context(), layer,
                           {.rope_dim = 6, .choice = RopeChoice::kEachFrequency}, &calibration);
  EXPECT_EQ(each.layer.options().rope.frequencies, (std::vector<double>{0.9, 0.5, 1e-6}));
  const auto spaced = to_mla(host_context(), layer,
                             {.rope_dim = 2, .choice = RopeChoice::kEachFrequency}, &calibration);
  EXPECT_EQ(spaced.layer.options().rope.frequencies.size(), 1u);
}

TEST(ToGqa, CalibratedPcaBeatsTheOthersOnAverage) {
  // Correlated inputs. Layer errors are not what is minimised, so the order is that of several
  // layers together.
  double errors[4] = {};
  for (std::uint64_t seed = 0; seed < 6; ++seed) {
    const MultiHeadAttention layer = random_layer(MultiHeadAttention(mha_options()), 40 + seed);
    Tensor x = random_tensor({4, 12, 24}, 60 + seed);
    for (std::int64_t i = 0; i < x.num_elements(); ++i) {
      x.data_as<double>()[i] *= std::exp(-0.2 * static_cast<double>(i % 24));
    }
    const Calibration calibration = calibrate(x);
    const auto error_with = [&](const GqaConversion& conversion, const Calibration* given) {
      return difference(layer, to_gqa(host_context(), layer, conversion, given).layer, x);
    };
    errors[0] += error_with({.num_kv_heads = 2}, &calibration);
    errors[1] += error_with({.num_kv_heads = 2}, nullptr);
    errors[2] += error_with({.num_kv_heads = 2, .merge = HeadMerge::kMean}, &calibration);
    errors[3] += error_with({.num_kv_heads = 2, .merge = HeadMerge::kFirst}, &calibration);
    // Best groups leave out no more than consecutive ones: a theorem of the search.
    const GqaConversion plain{.num_kv_heads = 2, .grouping = HeadGrouping::kConsecutive};
    EXPECT_LE(to_gqa(host_context(), layer, {.num_kv_heads = 2}, &calibration).summary.discarded,
              to_gqa(host_context(), layer, plain, &calibration).summary.discarded + 1e-12);
  }
  EXPECT_LT(errors[0], errors[1]);
  EXPECT_LT(errors[1], errors[2]);
  EXPECT_LT(errors[0], 0.8 * errors[2]);
  EXPECT_LT(errors[0], 0.8 * errors[3]);
}

TEST(ToGqa, LosesTheDiscardedEnergyOfValues) {
  // Without keys, with outputs that are the values and with sequences of one token nothing but
  // values can be lost, so that the error is known, and the smallest there is on these inputs.
  MultiHeadAttention layer = random_layer(MultiHeadAttention(mha_options()), 50);
  test::change_rows(layer, "k_proj", [](test::Rows& rows) {
    for (std::int64_t r = 0; r < 24; ++r) {
      for (std::int64_t c = 0; c < rows.columns; ++c) rows(r, c) = 0;
    }
  });
  Tensor identity(DType::kF64, {24, 24});
  for (std::int64_t n = 0; n < 24; ++n) identity.data_as<double>()[25 * n] = 1;
  layer.set_parameter(host_context(), "out_proj.weight", identity);
  Tensor x = random_tensor({60, 1, 24}, 51);
  for (std::int64_t i = 0; i < x.num_elements(); ++i) {
    x.data_as<double>()[i] *= std::exp(-0.2 * static_cast<double>(i % 24));
  }
  const Calibration calibration = calibrate(x);
  const GqaConversion plain{.num_kv_heads = 2, .grouping = HeadGrouping::kConsecutive};
  const auto best = to_gqa(host_context(), layer, plain, &calibration);
  const double error = difference(layer, best.layer, x);
  EXPECT_NEAR(error, std::sqrt(2 * best.summary.discarded), 1e-9);  // half of it is that of keys
  EXPECT_GT(error, 0.01);
  EXPECT_LT(error, difference(layer, to_gqa(host_context(), layer, plain).layer, x));
  for (const HeadMerge merge : {HeadMerge::kMean, HeadMerge::kFirst}) {
    GqaConversion other = plain;
    other.merge = merge;
    EXPECT_LT(error,
              difference(layer, to_gqa(host_context(), layer, other, &calibration).layer, x));
  }
}

TEST(OutputFit, NeverRaisesTheErrorOnItsInputs) {
  MultiHeadAttentionOptions options = mha_options();
  options.out_bias = true;
  options.dropout = 0.3;  // must not act
  const MultiHeadAttention layer = random_layer(MultiHeadAttention(options), 7);
  const Tensor x = random_tensor({6, 12, 24}, 8);
  const auto check = [&](auto converted) {
    const double before = difference(layer, converted.layer, x);
    OutputFit fit(layer, converted.layer);
    for (std::int64_t n = 0; n < 6; ++n) fit.add(host_context(), x.view().select(0, n));
    auto refitted = converted.layer;
    fit.apply(host_context(), refitted);
    EXPECT_LE(difference(layer, refitted, x), before);
    fit.apply(host_context(), refitted, 1e-6);
    EXPECT_LT(difference(layer, refitted, x), 0.9 * before);
    fit.apply(host_context(), converted.layer, 1e12);  // changes next to nothing
    EXPECT_NEAR(difference(layer, converted.layer, x), before, 1e-6 * before);
  };
  check(to_gqa(host_context(), layer, {.num_kv_heads = 2}));
  check(to_gqa(host_context(), layer, {.num_kv_heads = 1, .merge = HeadMerge::kMean}));
  check(to_mla(host_context(), layer, {.kv_rank = 8, .rope_dim = 4}));
}

TEST(OutputFit, DoesNoHarmWithFewTokens) {
  // 24 attended elements and 5 tokens in each of 4 sequences, white noise: a small ridge fits the
  // noise.
  const MultiHeadAttention layer = random_layer(MultiHeadAttention(mha_options()), 16);
  const auto converted = to_gqa(host_context(), layer, {.num_kv_heads = 2});
  const Tensor few = random_tensor({4, 5, 24}, 17);
  const Tensor held_out = random_tensor({20, 5, 24}, 18);
  const double before = difference(layer, converted.layer, held_out);
  OutputFit fit(layer, converted.layer);
  fit.add(host_context(), few);
  MultiHeadAttention chosen = converted.layer;
  fit.apply(host_context(), chosen);
  EXPECT_LT(difference(layer, chosen, held_out), 1.05 * before);
  MultiHeadAttention noisy = converted.layer;  // the control
  fit.apply(host_context(), noisy, 1e-6);
  EXPECT_GT(difference(layer, noisy, held_out), 1.2 * before);
}

TEST(Convert, SameBitsForAnyThreadsAndAgain) {
  MultiHeadAttentionOptions options = mha_options();
  options.dtype = DType::kF32;
  options.embed_dim = 96;
  options.head_dim = 24;
  const MultiHeadAttention layer(options, 9);
  const Tensor x = random_tensor({3, 700, 96}, 10, DType::kF32);
  const auto bytes = [&](int threads) {
    const Context context(ContextOptions{.num_threads = threads});
    Calibration calibration(96);
    calibration.add(context, x);
    auto gqa = to_gqa(context, layer, {.num_kv_heads = 2}, &calibration).layer;
    auto mla = to_mla(context, layer, {.kv_rank = 40, .rope_dim = 16}, &calibration).layer;
    OutputFit fit(layer, mla);
    fit.add(context, x.view().select(0, 0));
    fit.apply(context, mla);
    std::vector<float> all;
    for (const AttentionLayer* made :
         {static_cast<AttentionLayer*>(&gqa), static_cast<AttentionLayer*>(&mla)}) {
      for (const Parameter& parameter : made->named_parameters()) {
        const auto* const first = parameter.value.data_as<float>();
        all.insert(all.end(), first, first + parameter.num_elements());
      }
    }
    return all;
  };
  const std::vector<float> one = bytes(1);
  EXPECT_EQ(bytes(1), one);
  EXPECT_EQ(bytes(2), one);
  EXPECT_EQ(bytes(5), one);
}

TEST(CompareLayers, ByHand) {
  // Values are the inputs, outputs those of a uniform causal mean; `after` halves them.
  MultiHeadAttention layer = MultiHeadAttention::zeros(
      {.embed_dim = 2, .num_heads = 1, .causal = true, .dtype = DType::kF64});
  const Tensor identity = Tensor::from_values(DType::kF64, {2, 2}, {1, 0, 0, 1});
  layer.set_parameter(host_context(), "v_proj.weight", identity);
  layer.set_parameter(host_context(), "out_proj.weight", identity);
  MultiHeadAttention half = layer;
  half.set_parameter(host_context(), "out_proj.weight",
                     Tensor::from_values(DType::kF64, {2, 2}, {0.5, 0, 0, 1}));
  const Tensor x = Tensor::from_values(DType::kF64, {2, 2}, {4, 0, 0, 6});
  const LayerComparison loss = compare_layers(host_context(), layer, half, x);
  // Outputs (4, 0), (2, 3) and (2, 0), (1, 3).
  EXPECT_NEAR(loss.output_error, std::sqrt(5.0 / 29), 1e-14);
  EXPECT_NEAR(loss.output_error_after_first, std::sqrt(1.0 / 13), 1e-14);
  EXPECT_EQ(loss.weights_divergence, 0);
  EXPECT_EQ(loss.cache_before, 4);
  EXPECT_EQ(compare_layers(host_context(), layer, layer, x).output_error, 0);
  // Keys that prefer the first token: weights (p, 1 - p) instead of halves in the second row.
  half.set_parameter(host_context(), "q_proj.weight", identity);
  half.set_parameter(host_context(), "k_proj.weight", identity);
  const double score = 36 / std::sqrt(2.0);
  const double p = 1 / (1 + std::exp(score));
  const double expected = (std::log(0.5) - 0.5 * (std::log(p) + std::log(1 - p))) / 2;
  EXPECT_NEAR(compare_layers(host_context(), layer, half, x).weights_divergence, expected, 1e-9);
}

TEST(ShareRanks, GoToTheLayersThatNeedThem) {
  const std::vector<std::vector<double>> spectra = {
      {0.5, 0.3, 0.15, 0.05}, {0.97, 0.02, 0.01}, {0.4, 0.3, 0.2, 0.1}};
  EXPECT_EQ(share_ranks(spectra, 1), (std::vector<std::int64_t>{1, 1, 1}));
  EXPECT_EQ(share_ranks(spectra, 2), (std::vector<std::int64_t>{2, 1, 3}));
  EXPECT_EQ(share_ranks(spectra, 3), (std::vector<std::int64_t>{4, 1, 4}));
  EXPECT_EQ(
      error_of([&] { share_ranks(spectra, 4); }),
      "share_ranks: mean_rank: got 4, expected 1 to 3, the components that the layers have on "
      "average");
  const std::vector<std::vector<double>> rising = {{0.1, 0.9}};
  EXPECT_EQ(error_of([&] { share_ranks(rising, 1); }),
            "share_ranks: spectra: got one that rises or is not finite, expected falling energies");
}

}  // namespace
}  // namespace ladon
