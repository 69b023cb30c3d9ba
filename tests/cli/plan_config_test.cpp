// `ladon plan --config`: files, pipes and standard input, families that are loaded and others.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <thread>

#include "cli/plan_support.h"
#include "cli/run_ladon.h"
#include "io/io_support.h"

namespace ladon::test {
namespace {

TEST(CliPlan, AConfigFile) {
  const TempFolder temp;
  write_bytes(temp / "config.json", R"({"model_type":"mistral","hidden_size":4096,
    "num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":8,
    "rms_norm_eps":1e-05,"rope_theta":10000.0,"sliding_window":4096})");
  const Json preset = document_of({"plan", "--model", "mistral-7b", "--context", "32k"});
  for (const std::string& path : {temp.path().string(), (temp / "config.json").string()}) {
    const Json read = document_of({"plan", "--config", path, "--context", "32k"});
    EXPECT_EQ(read["models"][0]["caches"], preset["models"][0]["caches"]);
    EXPECT_EQ(read["models"][0]["windows"], preset["models"][0]["windows"]);
    EXPECT_EQ(read["models"][0]["name"], "mistral");
  }
  write_bytes(temp / "config.json", R"({"model_type":"llama","hidden_size":64,
    "num_attention_heads":4,"num_hidden_layers":2,"my_attention_note":1})");
  EXPECT_NE(complaint_of({"plan", "--config", temp.path().string()}, 1).find("my_attention_note"),
            std::string::npos);
  document_of({"plan", "--config", temp.path().string(), "--ignore-field", "my_attention_note"});
}

constexpr const char* kLlama3Config = R"({"model_type":"llama","hidden_size":4096,
  "num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":8,"vocab_size":128256,
  "intermediate_size":14336,"tie_word_embeddings":false,"torch_dtype":"bfloat16",
  "max_position_embeddings":8192})";

TEST(CliPlan, AnyFileNameStandardInputAndPipes) {
  const TempFolder temp;
  write_bytes(temp / "llama.txt", kLlama3Config);
  const Json preset = document_of({"plan", "--model", "llama-3-8b"});
  const auto expect = [&](const Outcome& outcome, const std::string& title) {
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Json document = Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
    ASSERT_TRUE(document.is_object()) << outcome.out;
    EXPECT_EQ(document["models"][0]["caches"], preset["models"][0]["caches"]);
    EXPECT_EQ(document["models"][0]["title"], title + " (llama)");
  };
  const std::string path = (temp / "llama.txt").string();
  expect(run_ladon({"plan", "--config", path, "--json"}), path);
  expect(run_ladon(LadonRun{.arguments = {"plan", "--config", "-", "--json"}, .in_path = path}),
         "standard input");
  const std::filesystem::path pipe = temp / "pipe";
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  std::thread writer([&] { write_bytes(pipe, kLlama3Config); });
  expect(run_ladon({"plan", "--config", pipe.string(), "--json"}), pipe.string());
  writer.join();
  write_bytes(temp / "llama.txt", "{");
  const std::string complaint =
      complaint_of(LadonRun{.arguments = {"plan", "--config", "-"}, .in_path = path}, 1);
  EXPECT_TRUE(complaint.starts_with("describe_model: standard input: ")) << complaint;
}

TEST(CliPlan, WeightsAreListedWithTheCache) {
  const TempFolder temp;
  write_bytes(temp / "config.json", kLlama3Config);
  Json model = document_of({"plan", "--config", temp.path().string()})["models"][0];
  // Two tables of 128256 * 4096; a layer has 2 * 4096 * 128 * (32 + 8) numbers in attention and
  // 3 * 4096 * 14336 in its MLP; 32 layers, 2 bytes a number. Norms are left out.
  const std::int64_t weights = 2 * (2LL * 128256 * 4096 + 32LL * (41943040 + 176160768));
  EXPECT_EQ(model["weight_bytes"], weights);
  EXPECT_EQ(model["max_context"], 8192);
  // A config may leave out what is its family's default.
  std::string silent = kLlama3Config;
  const std::string tied = "\"tie_word_embeddings\":false,";
  silent.erase(silent.find(tied), tied.size());
  const auto weights_of = [&](const std::string& config) {
    write_bytes(temp / "other.json", config);
    return document_of(
        {"plan", "--config", (temp / "other.json").string()})["models"][0]["weight_bytes"];
  };
  EXPECT_EQ(weights_of(silent), weights);
  silent.replace(silent.find("llama"), 5, "gemma");
  EXPECT_EQ(weights_of(silent), weights - 2 * 128256LL * 4096);
  auto caches =
      caches_of(document_of({"plan", "--config", temp.path().string(), "--memory", "24GiB"}));
  // 32 layers * 8 KV heads * 256 numbers * 2 bytes = 131,072 bytes a token.
  EXPECT_EQ(caches["GQA"]["most_context"], (24 * kGiB - weights) / 131072);
  caches = caches_of(document_of({"plan", "--model", "llama-3-70b", "--memory", "80GiB"}));
  EXPECT_EQ(caches["GQA"]["most_context"], 0);  // 131 GiB of weights
  const Outcome nothing = run_ladon({"plan", "--model", "llama-3-70b", "--memory", "80GiB"});
  EXPECT_NE(nothing.out.find("nothing fits: the weights alone are 131.41 GiB of 80 GiB"),
            std::string::npos)
      << nothing.out;
  const Outcome text = run_ladon({"plan", "--model", "llama-3-8b", "--memory", "24GiB"});
  EXPECT_NE(text.out.find(" of 24 GiB, next to weights of 14.96 GiB"), std::string::npos)
      << text.out;
  // The files next to the config say it exactly.
  write_bytes(temp / "model.safetensors", std::string(1000, 'x'));
  model = document_of({"plan", "--config", temp.path().string()})["models"][0];
  EXPECT_EQ(model["weight_bytes"], 1000);
}

TEST(CliPlan, FamiliesThatAreNotLoaded) {
  const TempFolder temp;
  write_bytes(temp / "config.json", R"({"model_type":"hal9000","hidden_size":4096,
    "num_attention_heads":32,"num_hidden_layers":4,"num_key_value_heads":8,"sliding_window":64,
    "layer_types":["full_attention","sliding_attention","full_attention","full_attention"]})");
  const Json document = document_of({"plan", "--config", temp.path().string(), "--context", "1k"});
  EXPECT_EQ(document["models"][0]["loadable"], false);
  EXPECT_EQ(document["models"][0]["name"], "hal9000");
  EXPECT_EQ(document["models"][0]["windows"], (std::vector<int>{0, 64, 0, 0}));
  // 8 KV heads of 128, keys and values, 2 bytes: 4096 bytes a token and layer.
  EXPECT_EQ(caches_of(document)["GQA"]["bytes"], 4096 * (3 * 1024 + 64));
  const Outcome text = run_ladon({"plan", "--config", temp.path().string()});
  EXPECT_NE(text.out.find("the family hal9000 is not supported by Ladon"), std::string::npos);
  // Text inside a model of several parts; a latent cache.
  write_bytes(temp / "config.json", R"({"model_type":"eyes","text_config":{"model_type":"words",
    "hidden_size":512,"num_attention_heads":8,"num_hidden_layers":2,"kv_lora_rank":64,
    "qk_rope_head_dim":16,"qk_nope_head_dim":32}})");
  const Json latent = document_of({"plan", "--config", temp.path().string(), "--context", "1"});
  EXPECT_EQ(latent["models"][0]["kind"], "MLA");
  EXPECT_EQ(caches_of(latent)["MLA"]["bytes"], 2 * 2 * (64 + 16));
}

TEST(CliPlan, Gemma3OfSeveralPartsHasTransformersDefaults) {
  // As published, for 12B: no head_dim, which is not 3840 / 16, and no pattern of windows.
  const TempFolder temp;
  write_bytes(temp / "config.json", R"({"architectures":["Gemma3ForConditionalGeneration"],
    "model_type":"gemma3","text_config":{"hidden_size":3840,"intermediate_size":15360,
    "model_type":"gemma3_text","num_attention_heads":16,"num_hidden_layers":48,
    "num_key_value_heads":8,"rope_scaling":{"factor":8.0,"rope_type":"linear"},
    "sliding_window":1024},"torch_dtype":"bfloat16","vision_config":{"hidden_size":1152}})");
  const Json document = document_of({"plan", "--config", temp.path().string(), "--context", "32k"});
  const Json& model = document["models"][0];
  EXPECT_EQ(model["head_dim"], 256);
  EXPECT_EQ(model["max_context"], 131072);
  // 8 layers of 48 keep every token; 2 * 8 * 256 numbers of 2 bytes.
  EXPECT_EQ(caches_of(document)["GQA"]["bytes"], 8192LL * (8 * 32768 + 40 * 1024));
  // 11.8 billion parameters, embeddings counted once.
  EXPECT_NEAR(model["weight_bytes"].get<double>(), 2 * 11.77e9, 2 * 0.02e9);
}

TEST(CliPlan, AConfigOfDeepSeeks) {
  const TempFolder temp;
  write_bytes(temp / "config.json", R"({"model_type":"deepseek_v3","hidden_size":7168,
    "num_attention_heads":128,"num_key_value_heads":128,"num_hidden_layers":61,
    "q_lora_rank":1536,"kv_lora_rank":512,"qk_nope_head_dim":128,"qk_rope_head_dim":64,
    "v_head_dim":128,"rope_theta":10000,"attention_bias":false})");
  const Json preset = document_of({"plan", "--model", "deepseek-v3"});
  const Json read = document_of({"plan", "--config", temp.path().string()});
  for (const char* field :
       {"caches", "windows", "kind", "num_layers", "embed_dim", "num_heads", "head_dim"}) {
    EXPECT_EQ(read["models"][0][field], preset["models"][0][field]) << field;
  }
}

}  // namespace
}  // namespace ladon::test
