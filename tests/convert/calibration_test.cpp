// Calibrations and their files, and what fits and comparisons refuse.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "convert/convert_support.h"
#include "ladon/safetensors.h"
#include "support/error_of.h"
#include "support/temp_folder.h"

namespace ladon {
namespace {

using test::difference;
using test::error_of;
using test::host_context;
using test::random_tensor;

TEST(CalibrationTest, MergesSavesAndLoads) {
  const Tensor x = random_tensor({3, 5, 8}, 11, DType::kF32);
  Calibration whole(8);
  whole.add(host_context(), x);
  Calibration parts(8);
  parts.add(host_context(), x.view().slice(0, 0, 1));
  Calibration rest(8);
  rest.add(host_context(), x.view().slice(0, 1, 3));
  parts.merge(rest);
  EXPECT_EQ(parts.tokens(), 15);
  EXPECT_EQ(parts.longest(), 5);
  const test::TempFolder folder;
  whole.save(folder.path() / "calibration.safetensors");
  const Calibration loaded = Calibration::load(folder.path() / "calibration.safetensors");
  EXPECT_EQ(loaded.tokens(), 15);
  EXPECT_EQ(loaded.longest(), 5);
  EXPECT_EQ(loaded.width(), 8);
  const MultiHeadAttention layer({.embed_dim = 8, .num_heads = 4, .dtype = DType::kF64}, 12);
  const auto key_of = [&](const Calibration& calibration) {
    const auto made = to_gqa(host_context(), layer, {.num_kv_heads = 2}, &calibration);
    const auto* const first = made.layer.parameter("k_proj.weight").value.data_as<double>();
    return std::vector<double>(first, first + 32);
  };
  EXPECT_EQ(key_of(loaded), key_of(whole));
  const auto merged = key_of(parts);
  const auto expected = key_of(whole);
  for (std::size_t i = 0; i < merged.size(); ++i) EXPECT_NEAR(merged[i], expected[i], 1e-10);
}

TEST(CalibrationTest, IsAsItWasAfterAnInterruption) {
  const Tensor x = random_tensor({2, 40, 64}, 13);
  int checks = 0;
  int last = -1;
  const Context context({.num_threads = 1, .check_interrupt = [&] {
                           if (checks++ == last) throw std::runtime_error("interrupted");
                         }});
  const MultiHeadAttention layer({.embed_dim = 64, .num_heads = 4, .dtype = DType::kF64}, 12);
  Calibration calibration(64);
  OutputFit fit(layer, layer);
  calibration.add(context, x);
  fit.add(context, x);
  const auto fitted = [&] {
    MultiHeadAttention copy = layer;
    fit.apply(host_context(), copy);
    const auto* const first = copy.parameter("out_proj.weight").value.data_as<double>();
    return std::vector<double>(first, first + 4096);
  };
  const auto saved = [&] {
    const test::TempFolder folder;
    calibration.save(folder.path() / "c");
    const Tensor products = SafetensorsFile::open(folder.path() / "c").load("products");
    const auto* const first = products.data_as<double>();
    return std::vector<double>(first, first + products.num_elements());
  };
  const auto fit_before = fitted();
  const auto saved_before = saved();
  int interruptions = 0;
  for (const bool to_fit : {false, true}) {
    for (last = 0;; ++last) {
      checks = 0;
      try {
        to_fit ? fit.add(context, x) : calibration.add(context, x);
        break;
      } catch (const std::runtime_error&) {
        ++interruptions;
      }
      EXPECT_EQ(calibration.tokens(), to_fit ? 160 : 80);
      if (to_fit) {
        ASSERT_EQ(fitted(), fit_before);
      } else {
        ASSERT_EQ(saved(), saved_before);
      }
    }
  }
  EXPECT_GE(interruptions, 4);
}

TEST(ConvertErrors, Calibrations) {
  EXPECT_EQ(error_of([] { Calibration(0); }), "Calibration: width: got 0, expected 1 to 1048576");
  Calibration calibration(4);
  const auto refuse = [&](const Tensor& x, const std::string& message) {
    EXPECT_EQ(error_of([&] { calibration.add(host_context(), x); }),
              "Calibration::add: x: " + message);
    EXPECT_EQ(calibration.tokens(), 0);
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  refuse(random_tensor({3, 5}, 1), "got [3, 5], expected [seq, 4] or [batch, seq, 4]");
  refuse(random_tensor({4}, 1), "got [4], expected [seq, 4] or [batch, seq, 4]");
  refuse(Tensor(DType::kF32, {0, 4}), "got [0, 4], expected at least one token");
  refuse(Tensor(DType::kBool, {1, 4}), "got dtype bool, expected f64, f32, f16 or bf16");
  refuse(Tensor::from_values(DType::kF32, {2, 4}, {1, 2, 3, 4, 5, 6, nan, 8}),
         "got nan, expected finite numbers");
  refuse(Tensor::from_values(DType::kBF16, {1, 4}, {1, 2, 3, infinity}),
         "got inf, expected finite numbers");
  const MultiHeadAttention layer({.embed_dim = 8, .num_heads = 2});
  EXPECT_EQ(error_of([&] { to_gqa(host_context(), layer, {.num_kv_heads = 1}, &calibration); }),
            "to_gqa: calibration: got a width of 4, expected embed_dim = 8");
  const Calibration empty(8);
  EXPECT_EQ(error_of([&] { to_mla(host_context(), layer, {}, &empty); }),
            "to_mla: calibration: got no tokens, expected some inputs of the layer");
  EXPECT_EQ(error_of([&] { calibration.merge(empty); }),
            "Calibration::merge: other: got a width of 8, expected 4");
  const test::TempFolder folder;
  EXPECT_EQ(error_of([&] { empty.save(folder.path() / "x"); }),
            "Calibration::save: tokens: got 0, expected something to save");
  // One token is enough to convert with.
  calibration.add(host_context(), random_tensor({1, 4}, 2));
  const MultiHeadAttention small({.embed_dim = 4, .num_heads = 2, .dtype = DType::kF64});
  const auto made = to_gqa(host_context(), small, {.num_kv_heads = 1}, &calibration);
  EXPECT_TRUE(std::isfinite(difference(small, made.layer, random_tensor({3, 4}, 3))));
}

TEST(ConvertErrors, WeightsThatAreNotFinite) {
  MultiHeadAttention layer(
      {.embed_dim = 8, .num_heads = 4, .num_kv_heads = 2, .dtype = DType::kF64});
  layer.parameter("k_proj.weight").value.data_as<double>()[3] =
      std::numeric_limits<double>::quiet_NaN();
  const std::string what = ": layer: got numbers in k_proj.weight that are not finite";
  EXPECT_EQ(error_of([&] { to_mla(host_context(), layer); }), "to_mla" + what);
  EXPECT_EQ(error_of([&] { to_gqa(host_context(), layer, {.num_kv_heads = 1}); }), "to_gqa" + what);
  LatentAttention latent({.embed_dim = 8,
                          .num_heads = 2,
                          .kv_rank = 4,
                          .nope_dim = 3,
                          .rope_dim = 2,
                          .value_dim = 3,
                          .query_norm = false,
                          .kv_norm = false,
                          .dtype = DType::kF64});
  latent.parameter("o_proj.weight").value.data_as<double>()[3] =
      std::numeric_limits<double>::infinity();
  EXPECT_EQ(error_of([&] { to_mha(host_context(), latent); }),
            "to_mha: layer: got numbers in o_proj.weight that are not finite");
  EXPECT_EQ(error_of([&] { reduce_rank(host_context(), latent); }),
            "reduce_rank: layer: got numbers in o_proj.weight that are not finite");
}

TEST(ConvertErrors, CalibrationFiles) {
  const test::TempFolder folder;
  const auto path = folder.path() / "file.safetensors";
  const auto refuse = [&](const std::vector<SafetensorsItem>& items,
                          const std::map<std::string, std::string>& metadata,
                          const std::string& message) {
    write_safetensors(path, items, metadata);
    EXPECT_EQ(error_of([&] { Calibration::load(path); }, ErrorCode::kIo),
              "Calibration::load: " + path.string() + ": " + message);
  };
  const std::map<std::string, std::string> counts = {{"tokens", "3"}, {"longest", "2"}};
  const Tensor sums = random_tensor({3}, 1);
  const Tensor products = random_tensor({3, 3}, 2);
  const Tensor narrow = random_tensor({3}, 1, DType::kF32);
  const Tensor other = random_tensor({4, 4}, 2);
  Tensor bad = random_tensor({3}, 1);
  bad.data_as<double>()[1] = std::numeric_limits<double>::infinity();
  refuse({{"sums", sums}, {"products", products}}, {{"tokens", "3"}},
         "got no positive number as longest, expected a file by Calibration::save()");
  refuse({{"sums", sums}, {"products", products}}, {{"tokens", "-3"}, {"longest", "1"}},
         "got no positive number as tokens, expected a file by Calibration::save()");
  refuse({{"sums", narrow}, {"products", products}}, counts,
         "sums: got dtype F32 and 1 dimensions, expected F64 and 1 of one size");
  refuse({{"sums", bad}, {"products", products}}, counts, "sums: got numbers that are not finite");
  refuse({{"sums", sums}, {"products", other}}, counts,
         "got products of 4 and sums of 3, expected one width");
}

TEST(ConvertErrors, FitsAndComparisons) {
  const MultiHeadAttention layer({.embed_dim = 8, .num_heads = 2});
  const MultiHeadAttention wide({.embed_dim = 12, .num_heads = 2});
  const MultiHeadAttention more({.embed_dim = 8, .num_heads = 4});
  const Tensor x = random_tensor({3, 8}, 1, DType::kF32);
  EXPECT_EQ(error_of([&] { OutputFit(layer, wide); }),
            "OutputFit: after: got an embed_dim of 12, expected 8 as before");
  OutputFit fit(layer, layer);
  MultiHeadAttention target = layer;
  EXPECT_EQ(error_of([&] { fit.apply(host_context(), target); }),
            "OutputFit::apply: tokens: got 0, expected add() before apply()");
  fit.add(host_context(), x);
  EXPECT_EQ(error_of([&] { fit.apply(host_context(), target, -1); }),
            "OutputFit::apply: ridge: got -1, expected a positive finite number");
  MultiHeadAttention other = wide;
  EXPECT_EQ(
      error_of([&] { fit.apply(host_context(), other); }),
      "OutputFit::apply: after: got a layer of another size, expected one like that which was "
      "fitted");
  EXPECT_EQ(error_of([&] { compare_layers(host_context(), layer, wide, x); }),
            "compare_layers: after: got an embed_dim of 12, expected 8 as before");
  EXPECT_EQ(error_of([&] { compare_layers(host_context(), layer, more, x); }),
            "compare_layers: after: got 4 query heads, expected 2 as before");
  const std::vector<std::int64_t> order = {1, 1};
  EXPECT_EQ(error_of([&] { compare_layers(host_context(), layer, layer, x, order); }),
            "compare_layers: head_order: got 2 heads, expected each of 2 once");
  EXPECT_EQ(error_of([&] {
              compare_layers(host_context(), layer, layer, Tensor(DType::kF32, {0, 8}));
            }),
            "compare_layers: x: got [0, 8], expected [seq, 8] or [batch, seq, 8], and tokens");
}

}  // namespace
}  // namespace ladon
