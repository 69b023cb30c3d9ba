// `ladon plan`: figures worked by hand, from the published configs.
#include <gtest/gtest.h>

#include <map>

#include "cli/plan_support.h"
#include "cli/run_ladon.h"
#include "io/io_support.h"

namespace ladon::test {
namespace {

TEST(CliPlan, DeepSeekV3) {
  const Json document =
      document_of({"plan", "--model", "deepseek-v3", "--context", "131072", "--batch", "8",
                   "--dtype", "bf16", "--memory", "80GiB", "--weights", "0"});
  auto caches = caches_of(document);
  ASSERT_EQ(caches.size(), 4U);
  // 61 layers; 8 * 131072 = 2^20 tokens; 2 bytes a number.
  //   MHA  128 heads * (128 + 128) = 32768 numbers    3,997,696 bytes a token
  //   GQA    8 heads * (128 + 128) =  2048              249,856
  //   MQA              128 + 128   =   256               31,232
  //   MLA              512 +  64   =   576               70,272
  EXPECT_EQ(caches["MHA"]["bytes_per_token"], 3997696);
  EXPECT_EQ(caches["GQA"]["bytes_per_token"], 249856);
  EXPECT_EQ(caches["MQA"]["bytes_per_token"], 31232);
  EXPECT_EQ(caches["MLA"]["bytes_per_token"], 70272);
  EXPECT_EQ(caches["MHA"]["bytes"], 3997696 * kMiB);
  EXPECT_EQ(caches["GQA"]["bytes"], 244 * kGiB);
  EXPECT_EQ(caches["MQA"]["bytes"], 31232 * kMiB);  // 30.5 GiB
  EXPECT_EQ(caches["MLA"]["bytes"], 70272 * kMiB);  // 68.625 GiB
  EXPECT_TRUE(caches["MLA"]["own"].get<bool>());
  EXPECT_FALSE(caches["MHA"]["own"].get<bool>());
  EXPECT_DOUBLE_EQ(caches["MLA"]["reduction"].get<double>(), 1 - 576.0 / 32768);
  // 80 * 2^30 / (8 * 70272) = 152797.7 tokens; 80 / 8.578125 = 9.3 sequences.
  EXPECT_EQ(caches["MLA"]["most_context"], 152797);
  EXPECT_EQ(caches["MLA"]["most_batch"], 9);
  EXPECT_EQ(caches["MHA"]["most_batch"], 0);
}

/// The schemes of --ranks by "phase name".
std::map<std::string, Json> schemes_of(const std::vector<std::string>& arguments,
                                       const std::string& model = "llama-3-8b") {
  std::vector<std::string> all{"plan", "--model", model, "--context", "8k"};
  all.insert(all.end(), arguments.begin(), arguments.end());
  std::map<std::string, Json> schemes;
  const Json document = document_of(all);
  for (const Json& scheme : document.at("ranks").at("schemes")) {
    schemes[scheme.at("phase").get<std::string>() + " " + scheme.at("name").get<std::string>()] =
        scheme;
  }
  return schemes;
}

TEST(CliPlan, Ranks) {
  auto four = schemes_of({"--ranks", "4"});
  ASSERT_EQ(four.size(), 6U);
  // 32 layers; 32 heads and 8 KV heads of 128; width 4096; 2 bytes an element; 8192 tokens.
  //   decode   heads       3 * (32 * 128 + 4096) / 4 * 2            = 12,288 a layer
  //            sequence    3 * 32 / 4 * (128 * 4 + 8 + 128 * 2)     = 18,624
  //   prefill  heads       8192 * 12,288
  //            all-gather  3 / 4 * 8192 * 8 * 256 * 2               = 25,165,824
  //            ulysses     3 * 2048 * (8 * 128 + 2 * 256 + 8 * 128) * 2 = 31,457,280
  EXPECT_EQ(four["decode heads"]["sent_bytes"], 32 * 12288);
  EXPECT_EQ(four["decode sequence"]["sent_bytes"], 32 * 18624);
  EXPECT_EQ(four["prefill heads"]["sent_bytes"], std::int64_t{32} * 12288 * 8192);
  EXPECT_EQ(four["prefill all-gather"]["sent_bytes"], 32 * 25165824);
  EXPECT_EQ(four["prefill ring"]["sent_bytes"], 32 * 25165824);
  EXPECT_EQ(four["prefill ulysses"]["sent_bytes"], 32 * 31457280);
  // A cache of 1 GiB.
  EXPECT_EQ(four["decode heads"]["cache_bytes"], kGiB / 4);
  EXPECT_EQ(four["decode sequence"]["cache_bytes"], kGiB / 4);
  // 32 layers of 2 collectives and 2 rounds of agreement with 3 others: 384 latencies of 30 us, and
  // 1.2 GB/s.
  EXPECT_NEAR(four["decode heads"]["seconds"].get<double>(), 384 * 30e-6 + 32 * 12288 / 1.2e9,
              1e-9);
  EXPECT_TRUE(four["decode heads"]["least"].get<bool>());
  EXPECT_TRUE(four["prefill all-gather"]["least"].get<bool>());

  auto eight = schemes_of({"--ranks", "8", "--link", "3us,50GB/s"});
  EXPECT_TRUE(eight["prefill ulysses"]["least"].get<bool>());  // more ranks than heads of a group
  EXPECT_NEAR(eight["decode heads"]["seconds"].get<double>(),
              32 * (4 * 7 * 3e-6 + 7 * (32 * 128 + 4096) / 8 * 2 / 50e9), 1e-9);
  auto sixteen = schemes_of({"--ranks", "16"});
  EXPECT_EQ(sixteen["decode heads"]["cache_bytes"], kGiB / 8);  // 8 KV heads, each on two ranks
  EXPECT_EQ(sixteen["decode sequence"]["cache_bytes"], kGiB / 16);
  auto seven = schemes_of({"--ranks", "7"});
  EXPECT_EQ(seven["decode heads"]["refused"], "32 heads are not a multiple of the ranks");
  EXPECT_TRUE(seven["decode sequence"]["least"].get<bool>());
  // Of 16 splits rank 0 has three, in sequences of 8192 keys.
  EXPECT_EQ(seven["decode sequence"]["cache_bytes"], kGiB / 8192 * 3 * 512);
  EXPECT_EQ(schemes_of({"--ranks", "4096"}).size(), 6U);

  const Outcome text =
      run_ladon({"plan", "--model", "deepseek-v3", "--ranks", "8", "--link", "infiniband"});
  EXPECT_EQ(text.status, 0) << text.err;
  // 61 layers; 128 heads; latents of 512 + 64; width 7168; 8192 tokens.
  //   decode   heads       7 * (128 * 128 + 7168) / 8 * 2                        = 41,216 a layer
  //            sequence    7 * 16 * (576 * 2 + 512 * 4 + 8) and those of heads   = 400,512
  //   prefill  all-gather  7 / 8 * 8192 * 576 * 2                                = 8,257,536
  auto latent = schemes_of({"--ranks", "8", "--link", "infiniband"}, "deepseek-v3");
  EXPECT_EQ(latent["decode heads"]["sent_bytes"], 61 * 41216);
  EXPECT_EQ(latent["decode sequence"]["sent_bytes"], 61 * 400512);
  EXPECT_EQ(latent["prefill all-gather"]["sent_bytes"], 61 * 8257536);
  EXPECT_TRUE(latent["prefill all-gather"]["least"].get<bool>());
  EXPECT_EQ(latent["prefill ring"]["refused"], "latents are gathered");
  EXPECT_NE(text.out.find("8 ranks over infiniband"), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("<- least"), std::string::npos) << text.out;
}

TEST(CliPlan, Llama3Of70B) {
  auto caches = caches_of(document_of({"plan", "--model", "llama-3-70b", "--context", "8k"}));
  // 80 layers * 8 KV heads * 256 numbers * 2 bytes = 327,680 bytes a token; times 8192: 2.5 GiB.
  // MHA has 64 heads: 8 times that. MLA of 4 * 128 + 64 = 576 numbers: 92,160 bytes a token.
  EXPECT_EQ(caches["GQA"]["bytes_per_token"], 327680);
  EXPECT_EQ(caches["GQA"]["bytes"], 5 * kGiB / 2);
  EXPECT_EQ(caches["MHA"]["bytes"], 20 * kGiB);
  EXPECT_EQ(caches["MQA"]["bytes"], 320 * kMiB);
  EXPECT_EQ(caches["MLA"]["bytes"], 720 * kMiB);
  EXPECT_TRUE(caches["GQA"]["own"].get<bool>());
  EXPECT_EQ(caches["GQA"]["reduction"], 0.875);
}

TEST(CliPlan, Mistral7BAndItsWindow) {
  auto caches = caches_of(document_of(
      {"plan", "--model", "mistral-7b", "--context", "32k", "--memory", "4GiB", "--weights", "0"}));
  // 32 layers * 8 KV heads * 256 numbers * 2 bytes = 131,072 bytes a token. The window keeps 4096
  // of the 32768 tokens: 512 MiB, where MHA without one needs 32768 * 524,288 bytes = 16 GiB.
  EXPECT_EQ(caches["GQA"]["bytes_per_token"], 131072);
  EXPECT_EQ(caches["GQA"]["bytes"], 512 * kMiB);
  EXPECT_EQ(caches["MHA"]["bytes"], 16 * kGiB);
  EXPECT_EQ(caches["MQA"]["bytes"], 512 * kMiB);
  EXPECT_EQ(caches["GQA"]["reduction"], 1 - 1.0 / 32);
  EXPECT_TRUE(caches["GQA"]["most_context"].is_null());  // any
  EXPECT_EQ(caches["GQA"]["most_batch"], 8);
  EXPECT_EQ(caches["MHA"]["most_context"], 8192);
  // Within the window there is nothing to save.
  caches = caches_of(document_of({"plan", "--model", "mistral-7b", "--context", "4k"}));
  EXPECT_EQ(caches["GQA"]["bytes"], 512 * kMiB);
  EXPECT_EQ(caches["GQA"]["reduction"], 0.75);
}

TEST(CliPlan, Falcon7B) {
  auto caches =
      caches_of(document_of({"plan", "--model", "falcon-7b", "--context", "2048", "--batch", "4"}));
  // 71 heads of 64, one KV head, 32 layers: 2 * 64 numbers * 2 bytes * 32 = 8192 bytes a token;
  // times 4 * 2048 tokens: 64 MiB. MHA: 71 times that. 71 is prime, so there is no GQA.
  ASSERT_EQ(caches.size(), 3U);
  EXPECT_EQ(caches["MQA"]["bytes_per_token"], 8192);
  EXPECT_EQ(caches["MQA"]["bytes"], 64 * kMiB);
  EXPECT_EQ(caches["MHA"]["bytes"], 71 * 64 * kMiB);
  EXPECT_TRUE(caches["MQA"]["own"].get<bool>());
  EXPECT_DOUBLE_EQ(caches["MQA"]["reduction"].get<double>(), 1 - 1.0 / 71);
}

TEST(CliPlan, EverySecondLayerHasAWindow) {
  auto caches = caches_of(document_of({"plan", "--model", "gpt-oss-20b", "--context", "1024"}));
  // 24 layers * 8 KV heads * 128 numbers * 2 bytes; 12 layers keep 1024 tokens, 12 keep 128.
  EXPECT_EQ(caches["GQA"]["bytes"], 12 * (1024 + 128) * 2048);
}

TEST(CliPlan, DtypesAndScales) {
  for (const char* dtype : {"i8", "fp8"}) {
    auto caches = caches_of(
        document_of({"plan", "--model", "llama-3-8b", "--context", "1", "--dtype", dtype}));
    // 32 layers * 8 heads * (256 bytes, and a scale of 4 bytes for the key and one for the value).
    EXPECT_EQ(caches["GQA"]["bytes"], 32 * 8 * (256 + 8));
  }
  auto caches =
      caches_of(document_of({"plan", "--model", "llama-3-8b", "--context", "1", "--dtype", "f32"}));
  EXPECT_EQ(caches["GQA"]["bytes"], 32 * 8 * 256 * 4);
}

TEST(CliPlan, TheTableSaysTheSame) {
  const Outcome outcome = run_ladon({"plan", "--model", "deepseek-v3", "--context", "131072",
                                     "--batch", "8", "--memory", "80GiB", "--weights", "0"});
  EXPECT_EQ(outcome.status, 0);
  EXPECT_EQ(outcome.err, "");
  for (const char* part : {"DeepSeek-V3: 61 layers, 128 heads of 128", "latent 512 + 64", "70,272",
                           "68.62 GiB", "98.2 %", "152,797", "<- the model", "in 80 GiB"}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << "\n" << outcome.out;
  }
}

TEST(CliPlan, WithoutAModelAllOfThem) {
  const Json document = document_of({"plan", "--memory", "24GB"});
  std::vector<std::string> names;
  for (const Json& model : document["models"]) names.push_back(model["name"]);
  for (const char* name : {"deepseek-v3", "deepseek-v2", "deepseek-v2-lite", "llama-3-8b",
                           "llama-3-70b", "mistral-7b", "falcon-7b", "qwen3-8b", "gpt-oss-20b"}) {
    EXPECT_NE(std::find(names.begin(), names.end(), name), names.end()) << name;
    const Outcome outcome = run_ladon({"plan"});
    EXPECT_NE(outcome.out.find(std::string("\n") + name + " "), std::string::npos) << outcome.out;
  }
  EXPECT_EQ(document["memory"], 24000000000);
}

TEST(CliPlan, WarnsPastTheModelsContext) {
  const Outcome past = run_ladon({"plan", "--model", "llama-3-8b", "--context", "16k"});
  EXPECT_NE(past.out.find("warning: the model supports 8,192 tokens, not 16,384"),
            std::string::npos)
      << past.out;
  EXPECT_EQ(run_ladon({"plan", "--model", "llama-3-8b"}).out.find("warning"), std::string::npos);
  const Outcome all = run_ladon({"plan", "--context", "4k"});
  EXPECT_NE(
      all.out.find("\nwarning: some models support fewer tokens: falcon-7b 2,048, gpt-2 1,024\n"),
      std::string::npos)
      << all.out;
  EXPECT_EQ(run_ladon({"plan", "--context", "1k"}).out.find("warning"), std::string::npos);
}

TEST(CliPlan, WindowedRowsExplainThemselves) {
  const Outcome outcome = run_ladon({"plan", "--model", "mistral-7b", "--context", "32k"});
  EXPECT_NE(outcome.out.find(
                "windows: the model's own row drops keys outside the windows;\nthe other rows "
                "keep every token"),
            std::string::npos)
      << outcome.out;
}

TEST(CliPlan, Mistakes) {
  const auto expect = [](std::vector<std::string> arguments, int status, const char* part) {
    arguments.insert(arguments.begin(), "plan");
    const std::string complaint = complaint_of(arguments, status);
    EXPECT_NE(complaint.find(part), std::string::npos) << complaint;
  };
  expect({"--model", "gpt-9"}, 2,
         "--model: no model 'gpt-9', did you mean gpt-2?; there are deepseek-v3, ");
  expect({"--context", "0"}, 2, "plan: --context: '0' is not a whole number from 1 to");
  expect({"--context", "12q"}, 2, "'12q' is not a whole number");
  expect({"--context", "9999999999999999999"}, 2, "is not a whole number");
  expect({"--batch", "-1"}, 2, "'-1' is not a whole number");
  expect({"--dtype", "f4"}, 2, "--dtype: no dtype 'f4'; there are f64, f32, f16, bf16, i8, f8e4m3");
  expect({"--memory", "80"}, 2, "--memory: got 80 B, expected at least 1 MiB; sizes have a unit");
  expect({"--memory", "lots"}, 2, "--memory: 'lots' is not a size");
  expect({"--memory", "-1GiB"}, 2, "--memory: '-1GiB' is not a size");
  expect({"--memory", "1 Zorkmid"}, 2, "is not a size");
  expect({"--model", "llama-3-8b", "--config", "."}, 2, "exclude");
  expect({"--config", "/nonexistent/folder"}, 1, "/nonexistent/folder");
  expect({"--config", "/dev/null"}, 1, "/dev/null");
  expect({"--ranks", "2"}, 2, "--ranks: needs one model, by --model or --config");
  expect({"--ranks", "0", "--model", "llama-3-8b"}, 2, "'0' is not a whole number");
  expect({"--link", "10gbe", "--model", "llama-3-8b"}, 2, "--link");
  expect({"--model", "llama-3-8b", "--ranks", "2", "--link", "tin-cans"}, 2,
         "--link: got \"tin-cans\", expected one of memory, nvlink,");
  expect({"--model", "llama-3-8b", "--ranks", "2", "--link", "3us,fast"}, 2,
         "--link: got \"fast\", expected a bandwidth such as 1.2GB/s");
  expect({"--model", "llama-3-8b", "--ranks", "2", "--link", "-3us,1GB/s"}, 2,
         "expected a latency such as 30us");
  // More bytes than can be counted.
  expect({"--model", "llama-3-8b", "--context", "1048576m", "--batch", "1048576m"}, 1, "too large");
  const TempFolder temp;
  write_bytes(temp / "config.json", R"({"model_type":"llama")");
  expect({"--config", temp.path().string()}, 1, "config.json");
  write_bytes(temp / "config.json", R"({"model_type":"hal9000"})");
  expect({"--config", temp.path().string()}, 1, "hal9000");
}

}  // namespace
}  // namespace ladon::test
