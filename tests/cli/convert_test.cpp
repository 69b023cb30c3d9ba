// `ladon convert`: a model folder's attention as another kind.
#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>

#include "cli/run_ladon.h"
#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "ladon/convert.h"
#include "ladon/npy.h"
#include "ladon/random.h"
#include "models/model_folder.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

/// A small model in two files with a tensor and a file that are not attention's, and inputs.
class CliConvert : public testing::Test {
 protected:
  void SetUp() override { write_case("llama3"); }

  void write_case(const std::string& name, DType dtype = DType::kF32) {
    for (const char* const folder : {"model", "acts"}) {
      std::filesystem::remove_all(temp_ / folder);
      std::filesystem::create_directory(temp_ / folder);
    }
    FamilyCase setup = family_case(name);
    setup.tensors.emplace("lm_head.weight", TensorMaker(3).make({7, 5}, 1));
    write_model(temp_ / "model", setup, dtype, /*sharded=*/true);
    write_bytes(temp_ / "model" / "tokenizer.json", "{}");
    for (int n = 0; n < setup.num_layers; ++n) {
      Tensor x(DType::kF32, {10, 16, setup.embed_dim});
      fill_normal(host_context(), x, 0, 1, static_cast<std::uint64_t>(n) + 5);
      write_npy(temp_ / "acts" / ("layer_" + std::to_string(n) + ".npy"), x);
    }
  }

  std::string path(const std::string& name) const { return (temp_ / name).string(); }
  std::vector<std::string> arguments(const std::vector<std::string>& more) const {
    std::vector<std::string> all{"convert", "--model", path("model")};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  std::vector<std::string> calibrated(std::vector<std::string> more) const {
    more.insert(more.end(), {"--calibrate", path("acts")});
    return arguments(more);
  }
  /// The error of a layer of a folder against the source's, on new inputs.
  double error_of_layer(const std::string& folder, int layer) const {
    const auto before = load_attention(host_context(), temp_ / "model", layer);
    const auto after = load_attention(host_context(), temp_ / folder, layer);
    Tensor x(DType::kF32, {3, 16, before->embed_dim()});
    fill_normal(host_context(), x, 0, 1, 99);
    return compare_layers(host_context(), *before, *after, x).output_error;
  }
  static std::string bytes_of(const std::filesystem::path& file) {
    std::ifstream stream(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(stream), {}};
  }
  /// Files and folders next to the model and the inputs.
  std::vector<std::string> others() const {
    std::vector<std::string> names = temp_.files();
    std::erase_if(names, [](const std::string& n) { return n == "model" || n == "acts"; });
    return names;
  }

  TempFolder temp_;
  std::string first_;  // bytes of the first run
};

TEST_F(CliConvert, ExactConversionsLoadAndAgree) {
  const auto mha = document_of(arguments({"--to", "mha", "--output", path("mha")}));
  EXPECT_EQ(mha.at("rows").size(), 2);
  EXPECT_TRUE(mha.at("rows")[0].at("exact"));
  EXPECT_FALSE(mha.at("calibrated"));
  EXPECT_EQ(describe_model(temp_ / "mha").num_kv_heads, 6);
  EXPECT_LT(error_of_layer("mha", 1), 1e-6);

  const auto mla = document_of(calibrated({"--to", "mla", "--output", path("mla")}));
  EXPECT_EQ(describe_model(temp_ / "mla").family, "ladon_latent");
  for (int layer = 0; layer < 2; ++layer) {
    EXPECT_TRUE(mla.at("rows")[static_cast<std::size_t>(layer)].at("exact"));
    EXPECT_LT(error_of_layer("mla", layer), 2e-6);
  }
  // What is not attention is passed through.
  const ShardedSafetensors weights = ShardedSafetensors::open(temp_ / "mla");
  EXPECT_EQ(weights.shards().size(), 2u);
  EXPECT_TRUE(weights.has("lm_head.weight"));
  EXPECT_FALSE(weights.has("layers.0.self_attn.k_proj.weight"));
  const ShardedSafetensors source = ShardedSafetensors::open(temp_ / "model");
  const Tensor before = source.load("lm_head.weight");
  const Tensor after = weights.load("lm_head.weight");
  EXPECT_TRUE(
      std::equal(before.data_as<float>(), before.data_as<float>() + 35, after.data_as<float>()));
  EXPECT_EQ(bytes_of(temp_ / "mla" / "tokenizer.json"), "{}");
  EXPECT_EQ(run_ladon({"plan", "--config", path("mla")}).status, 0);
}

TEST_F(CliConvert, BalancedWeightsGiveTheSameBits) {
  const auto path_of = [&](int layer) {
    return temp_ / "acts" / ("layer_" + std::to_string(layer) + ".npy");
  };
  for (int layer = 0; layer < 2; ++layer) {  // one element of the inputs stands out
    Tensor x = read_npy(path_of(layer));
    const std::int64_t width = x.size(2);
    for (std::int64_t n = 3; n < x.num_elements(); n += width) x.data_as<float>()[n] *= 50;
    write_npy(path_of(layer), x);
  }
  const auto plain = document_of(calibrated({"--to", "mha", "--output", path("mha")}));
  const auto balanced =
      document_of(calibrated({"--to", "mha", "--balance", "--output", path("balanced")}));
  for (std::size_t layer = 0; layer < 2; ++layer) {
    EXPECT_EQ(balanced.at("rows")[layer], plain.at("rows")[layer]);
    const int n = static_cast<int>(layer);
    EXPECT_EQ(error_of_layer("balanced", n), error_of_layer("mha", n));
    const auto key_of = [&](const char* folder) {
      const Tensor key = load_attention(host_context(), temp_ / folder, n)
                             ->parameter("k_proj.weight")
                             .value.to_host();
      const auto* const first = key.data_as<float>();
      return std::vector<float>(first, first + key.num_elements());
    };
    EXPECT_NE(key_of("balanced"), key_of("mha"));
  }

  write_case("llama3", DType::kF16);
  const std::string complaint = complaint_of(
      LadonRun{.arguments = arguments({"--to", "mha", "--balance", "--output", path("f16")})}, 1);
  EXPECT_NE(complaint.find("--balance: got weights in f16"), std::string::npos) << complaint;
  EXPECT_FALSE(std::filesystem::exists(temp_ / "f16"));
}

TEST_F(CliConvert, LossesAreMeasuredOnTheWrittenWeights) {
  const auto gqa = document_of(calibrated({"--to", "mqa", "--output", path("mqa")}));
  EXPECT_EQ(describe_model(temp_ / "mqa").num_kv_heads, 1);
  const auto& row = gqa.at("rows")[1];
  EXPECT_FALSE(row.at("exact"));
  EXPECT_EQ(row.at("cache_before"), 32);
  EXPECT_EQ(row.at("cache_after"), 16);
  EXPECT_GT(row.at("error"), 0.01);
  EXPECT_LT(row.at("error"), 1);
  EXPECT_GT(row.at("weights_divergence"), 0);
  // Query heads may have another order; outputs have not.
  EXPECT_NEAR(error_of_layer("mqa", 1), row.at("error"), 0.5 * row.at("error").get<double>());

  const auto mean = document_of(
      calibrated({"--to", "mqa", "--merge", "mean", "--no-refit", "--output", path("mean")}));
  EXPECT_GT(mean.at("rows")[1].at("error"), row.at("error"));
  const Outcome table = run_ladon(arguments({"--to", "mqa", "--output", path("blind")}));
  EXPECT_TRUE(table.out.ends_with("\nwrote " + path("blind") + "\n")) << table.out;
  EXPECT_EQ(table.status, 0);
  EXPECT_NE(table.out.find("Weights alone"), std::string::npos);
}

TEST_F(CliConvert, SameBytesForAnyThreads) {
  for (const char* const threads : {"1", "2", "3", "5", "1"}) {
    std::filesystem::remove_all(temp_ / "out");
    ASSERT_EQ(run_ladon(calibrated({"--to", "mla", "--kv-rank", "10", "--rope-dim", "8",
                                    "--threads", threads, "--output", path("out")}))
                  .status,
              0);
    std::string all;
    for (const auto& name : {"config.json", "model.safetensors.index.json"}) {
      all += bytes_of(temp_ / "out" / name);
    }
    for (const std::string& shard : ShardedSafetensors::open(temp_ / "out").shards()) {
      all += bytes_of(temp_ / "out" / shard);
    }
    if (first_.empty()) first_ = all;
    EXPECT_TRUE(all == first_) << threads;
  }
  EXPECT_GT(error_of_layer("out", 0), 0.001);
}

TEST_F(CliConvert, RanksMayDiffer) {
  const auto document = document_of(calibrated({"--to", "mla", "--kv-rank", "9", "--rope-dim", "6",
                                                "--unequal-ranks", "--output", path("out")}));
  int total = 0;
  for (int layer = 0; layer < 2; ++layer) {
    const auto& row = document.at("rows")[static_cast<std::size_t>(layer)];
    const int rank = row.at("kv_rank");
    total += rank;
    const auto loaded = load_attention(host_context(), temp_ / "out", layer);
    EXPECT_EQ(cache_elements(*loaded), rank + 6);
    EXPECT_NEAR(error_of_layer("out", layer), row.at("error"), 0.5 * row.at("error").get<double>());
  }
  EXPECT_EQ(total, 18);
}

TEST_F(CliConvert, SweepsAndDraws) {
  const auto sweep = document_of(calibrated(
      {"--to", "mla", "--sweep", "4,12", "--rope-dims", "4,12", "--plot", path("curve.svg")}));
  ASSERT_EQ(sweep.at("rows").size(), 8);
  double errors[4] = {};
  for (const auto& row : sweep.at("rows")) {
    const auto rank = row.at("kv_rank").get<int>();
    const auto rope = row.at("rope_dim").get<int>();
    EXPECT_EQ(row.at("cache_after"), rank + rope);
    errors[(rank == 12 ? 2 : 0) + (rope == 12 ? 1 : 0)] += row.at("error").get<double>();
  }
  EXPECT_LT(errors[3], errors[0]);  // more cache, less error
  EXPECT_EQ(others(), std::vector<std::string>{"curve.svg"});
  const std::string svg = bytes_of(temp_ / "curve.svg");
  EXPECT_NE(svg.find("MLA, rope 12"), std::string::npos);
  EXPECT_EQ(document_of(calibrated({"--to", "gqa", "--sweep", "1,2"})).at("rows").size(), 4);
}

TEST_F(CliConvert, FailuresLeaveNothingBehind) {
  const auto expect = [&](const std::vector<std::string>& command, const std::string& message,
                          int status = 1) {
    EXPECT_NE(complaint_of(command, status).find(message), std::string::npos)
        << complaint_of(command, status);
    EXPECT_TRUE(others().empty());
  };
  const std::string out = path("out");
  expect(calibrated({"--to", "mqa", "--output", out, "--max-error", "0.001"}),
         "convert: --max-error: layer 0 has an error of ");
  expect(arguments({"--to", "gqa", "--kv-heads", "5", "--output", out}),
         "to_gqa: num_kv_heads: got 5");
  expect(arguments({"--to", "mla", "--kv-rank", "999", "--output", out}),
         "convert: layer 0: to_mla: kv_rank: got 999");
  expect(arguments({"--to", "mla", "--rope-dim", "3", "--output", out}), "to_mla: rope_dim: got 3");
  expect(arguments({"--to", "mha", "--output", path("model")}), "is there already");
  expect(arguments({"--to", "mha", "--output", path("no/out")}), "cannot write in");
  expect(arguments({"--to", "mla", "--calibrate", path("none"), "--output", out}), "layer_0.npy");

  const auto spoil = [&](const Tensor& x) { write_npy(temp_ / "acts" / "layer_1.npy", x); };
  spoil(Tensor(DType::kF32, {4, 6, 21}));
  expect(calibrated({"--to", "mqa", "--output", out}),
         "got f32 [4, 6, 21], expected floats [seq, 20] or [batch, seq, 20]");
  spoil(Tensor(DType::kF32, {1, 20}));
  expect(calibrated({"--to", "mqa", "--output", out}), "expected at least two tokens");
  spoil(Tensor(DType::kF32, {0, 20}));
  expect(calibrated({"--to", "mqa", "--output", out}), "expected at least two tokens");
  // The last sequence is held out, and must be finite all the same.
  for (const std::int64_t token : {0, 23}) {
    Tensor nan(DType::kF32, {3, 8, 20});
    nan.data_as<float>()[20 * token + 7] = std::numeric_limits<float>::quiet_NaN();
    spoil(nan);
    expect(calibrated({"--to", "mqa", "--output", out}),
           "layer_1.npy: got nan at token " + std::to_string(token) + ", expected finite numbers");
  }

  // A full disk, and what a family cannot hold.
  EXPECT_NE(complaint_of(LadonRun{.arguments = arguments({"--to", "mha", "--output", out}),
                                  .file_size_limit = 3000},
                         1)
                .size(),
            0u);
  EXPECT_TRUE(others().empty());
  write_case("gpt2");
  expect(arguments({"--to", "gqa", "--kv-heads", "1", "--output", out}),
         "family gpt2 has no field for KV heads");
  write_case("deepseek_v3");
  expect(arguments({"--to", "mha", "--output", out}), "is latent attention already");
  write_case("qwen3");
  expect(arguments({"--to", "mla", "--output", out}), "to_mla: qk_norm: got true");
}

TEST_F(CliConvert, OptionsThatDoNotGoTogether) {
  const auto expect = [&](const std::vector<std::string>& more, const std::string& message) {
    EXPECT_NE(complaint_of(arguments(more), 2).find(message), std::string::npos)
        << complaint_of(arguments(more), 2);
  };
  const std::string out = path("out");
  expect({"--to", "gqa", "--output", out}, "--to gqa: expected --kv-heads or --sweep");
  expect({"--to", "mha"}, "expected --output or --sweep");
  expect({"--to", "mla", "--kv-heads", "2", "--output", out}, "--kv-heads: expected --to gqa");
  expect({"--to", "mha", "--kv-rank", "2", "--output", out}, "--kv-rank: expected --to mla");
  expect({"--to", "mla", "--unequal-ranks", "--output", out},
         "--unequal-ranks: expected --kv-rank as well");
  expect({"--to", "mha", "--rope-dim", "2", "--output", out}, "--rope-dim: expected --to mla");
  expect({"--to", "mla", "--merge", "mean", "--output", out}, "--merge: expected --to gqa");
  expect({"--to", "mla", "--balance", "--output", out}, "--balance: expected --to mha, gqa or mqa");
  expect({"--to", "mla", "--rope-dims", "2", "--output", out}, "--rope-dims: expected --sweep");
  expect({"--to", "mla", "--plot", path("x.svg"), "--output", out}, "--plot: expected --sweep");
  expect({"--to", "mla", "--sweep", "2"}, "--sweep requires --calibrate");
  expect({"--to", "mha", "--sweep", "2", "--calibrate", path("acts")},
         "--sweep: expected --to gqa or mla");
  expect({"--to", "mla", "--sweep", "2", "--calibrate", path("acts"), "--output", out},
         "--sweep: writes nothing");
  expect({"--to", "mla", "--max-error", "2", "--output", out}, "--max-error requires --calibrate");
  for (const char* const bad : {"-1", "nan", "inf"}) {
    expect({"--to", "mla", "--max-error", bad, "--calibrate", path("acts"), "--output", out},
           "--max-error: got ");
  }
}

}  // namespace
}  // namespace ladon::test
