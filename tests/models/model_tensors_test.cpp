// load_attention() on folders whose tensors are wrong, and attention_tensors() on layers that do
// not fit: the whole message each time, and no layer.
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "models/model_folder.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

class ModelTensors : public testing::Test {
 protected:
  std::string refusal(std::int64_t layer = 0, ErrorCode code = ErrorCode::kIo,
                      const LoadOptions& options = {}) {
    return error_of([&] { load_attention(host_context(), temp_.path(), layer, options); }, code);
  }
  /// "load_attention: <folder>/<file>: tensor "<name>": " and the rest.
  std::string about(const std::string& file, const std::string& tensor, const std::string& what) {
    const std::filesystem::path path = file.empty() ? temp_.path() : temp_ / file;
    return "load_attention: " + path.string() + ": tensor \"" + tensor + "\": " + what;
  }

  FamilyCase setup_ = family_case("llama3");
  TempFolder temp_;
};

TEST_F(ModelTensors, MissingOnes) {
  setup_.tensors.erase("layers.1.self_attn.k_proj.bias");
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_NO_THROW(load_attention(host_context(), temp_.path(), 0));
  EXPECT_EQ(refusal(1),
            about("", "layers.1.self_attn.k_proj.bias", "got none, expected one of shape [16]"));
}

TEST_F(ModelTensors, MissingLayers) {
  std::erase_if(setup_.tensors,
                [](const auto& each) { return each.first.starts_with("layers.1."); });
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_EQ(refusal(1), "load_attention: " + temp_.path().string() +
                            ": got no tensor under \"model.layers.1.self_attn.\" or "
                            "\"layers.1.self_attn.\", expected the layer's under one of them");
  // Both ways of naming in one folder: which is meant?
  setup_.tensors.emplace("model.layers.0.self_attn.x", TensorMaker(1).make({1}, 1));
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_EQ(refusal(0), "load_attention: " + temp_.path().string() +
                            ": got tensors under both \"model.layers.0.self_attn.\" and "
                            "\"layers.0.self_attn.\", expected the layer's under one of them");
}

TEST_F(ModelTensors, UnexpectedOnes) {
  setup_.tensors.emplace("layers.0.self_attn.q_norm.weight", TensorMaker(1).make({8}, 1));
  write_model(temp_.path(), setup_, DType::kF32, /*sharded=*/true);
  EXPECT_NO_THROW(load_attention(host_context(), temp_.path(), 1));
  const std::string shard =
      ShardedSafetensors::open(temp_.path()).shard_of("layers.0.self_attn.q_norm.weight");
  EXPECT_EQ(refusal(0),
            about(shard, "layers.0.self_attn.q_norm.weight",
                  "got a tensor that is not expected, expected only the attention's own "
                  "under \"layers.0.self_attn.\""));
  // A bias that the config does not speak of.
  FamilyCase mistral = family_case("mistral");
  mistral.tensors.emplace("model.layers.0.self_attn.o_proj.bias", TensorMaker(1).make({20}, 1));
  std::filesystem::remove(temp_ / "model.safetensors.index.json");
  write_model(temp_.path(), mistral, DType::kF32);
  EXPECT_EQ(refusal(0),
            about("model.safetensors", "model.layers.0.self_attn.o_proj.bias",
                  "got a tensor that is not expected, expected only the attention's own "
                  "under \"model.layers.0.self_attn.\""));
}

TEST_F(ModelTensors, MisshapenOnes) {
  const std::vector<std::pair<Dims, std::string>> shapes = {
      {{16, 21}, "[16, 21]"},
      {{20, 16}, "[20, 16]"},
      {{16}, "[16]"},
      {{1, 16, 20}, "[1, 16, 20]"},
      {{}, "[]"},
      {{1, 1, 1, 1, 1, 1, 1, 1}, "[1, 1, 1, 1, 1, 1, 1, 1]"},
      {{0, 20}, "[0, 20]"}};
  for (const auto& [shape, text] : shapes) {
    setup_.tensors.insert_or_assign("layers.0.self_attn.k_proj.weight",
                                    TensorMaker(1).make(shape, 1));
    write_model(temp_.path(), setup_, DType::kF32, /*sharded=*/true);
    const std::string shard =
        ShardedSafetensors::open(temp_.path()).shard_of("layers.0.self_attn.k_proj.weight");
    EXPECT_EQ(refusal(0), about(shard, "layers.0.self_attn.k_proj.weight",
                                "got " + text + ", expected [16, 20]"));
  }
}

TEST_F(ModelTensors, WrongTypes) {
  std::vector<Tensor> kept;
  const auto write = [&](DType dtype) {
    std::vector<SafetensorsItem> items;
    kept.clear();
    kept.reserve(setup_.tensors.size());
    for (const auto& [name, tensor] : setup_.tensors) {
      const bool other = name == "layers.0.self_attn.v_proj.weight";
      kept.push_back(Tensor::copy_of(host_context(), tensor, other ? dtype : DType::kF32));
      items.push_back({name, kept.back()});
    }
    write_bytes(temp_ / "config.json", setup_.config);
    write_safetensors(temp_ / "model.safetensors", items);
  };
  for (const auto& [dtype, name] : {std::pair(DType::kI8, "I8"), std::pair(DType::kBool, "BOOL"),
                                    std::pair(DType::kI64, "I64")}) {
    write(dtype);
    const std::string expected =
        about("model.safetensors", "layers.0.self_attn.v_proj.weight",
              std::string("got dtype ") + name + ", expected F64, F32, F16 or BF16");
    EXPECT_EQ(refusal(0), expected);
    EXPECT_EQ(refusal(0, ErrorCode::kIo, {.dtype = DType::kF32}), expected);
  }
  // Tensors of two types: the caller must say which it is to be.
  write(DType::kBF16);
  EXPECT_EQ(refusal(0),
            about("model.safetensors", "layers.0.self_attn.v_proj.weight",
                  "got dtype BF16, expected that of \"layers.0.self_attn.q_proj.weight\", "
                  "which is f32 (or ask for a dtype)"));
  EXPECT_EQ(load_attention(host_context(), temp_.path(), 0, {.dtype = DType::kF32})->dtype(),
            DType::kF32);
  EXPECT_EQ(refusal(0, ErrorCode::kInvalidArgument, {.dtype = DType::kI8}),
            "load_attention: dtype: got i8, expected f64, f32, f16 or bf16");
}

TEST_F(ModelTensors, TypesThatLadonDoesNotHave) {
  std::string header = "{";
  std::string data;
  for (const auto& [name, tensor] : setup_.tensors) {
    const bool quantised = name == "layers.0.self_attn.o_proj.weight";
    std::string shape;
    for (const std::int64_t size : tensor.shape()) {
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
    }
    const auto bytes = static_cast<std::size_t>(tensor.num_elements()) * (quantised ? 1 : 4);
    header += (header.size() > 1 ? ",\"" : "\"") + name + "\":{\"dtype\":\"" +
              (quantised ? "F8_E4M3" : "F32") + "\",\"shape\":[" + shape + "],\"data_offsets\":[" +
              std::to_string(data.size()) + "," + std::to_string(data.size() + bytes) + "]}";
    data.append(bytes, '\0');
  }
  write_bytes(temp_ / "config.json", setup_.config);
  write_bytes(temp_ / "model.safetensors", safetensors_bytes(header + "}", data));
  EXPECT_EQ(refusal(0),
            about("model.safetensors", "layers.0.self_attn.o_proj.weight",
                  "got dtype F8_E4M3, expected F64, F32, F16 or BF16: quantised weights "
                  "must be converted first"));
}

TEST_F(ModelTensors, LayersOutOfRange) {
  write_model(temp_.path(), setup_, DType::kF32);
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{2}, INT64_MAX, INT64_MIN}) {
    EXPECT_EQ(refusal(bad, ErrorCode::kInvalidArgument),
              "load_attention: layer_index: got " + std::to_string(bad) + ", expected 0 to 1");
  }
}

TEST_F(ModelTensors, ShardsThatDisagreeOrAreCutShort) {
  write_model(temp_.path(), setup_, DType::kF32, /*sharded=*/true);
  const std::string index = read_bytes(temp_ / "model.safetensors.index.json");
  const std::string second = read_bytes(temp_ / kSecond);
  EXPECT_NO_THROW(load_attention(host_context(), temp_.path(), 0));
  // The index names the wrong file for all of them.
  std::string swapped = index;
  for (std::size_t at = 0; (at = swapped.find("-00001-", at)) != std::string::npos; ++at) {
    swapped[at + 5] = '2';
  }
  write_bytes(temp_ / "model.safetensors.index.json", swapped);
  EXPECT_TRUE(refusal(0).starts_with("load_attention: " + temp_.path().string()));
  write_bytes(temp_ / "model.safetensors.index.json", index);
  for (const std::size_t length : {second.size() - 1, second.size() / 2, std::size_t{9}}) {
    write_bytes(temp_ / kSecond, std::string_view(second).substr(0, length));
    EXPECT_TRUE(refusal(0).starts_with("load_attention: " + (temp_ / kSecond).string())) << length;
  }
  std::filesystem::remove(temp_ / kSecond);
  EXPECT_EQ(refusal(0),
            "load_attention: " + (temp_ / kSecond).string() +
                ": got \"No such file or directory\", expected a file that can be read");
  std::filesystem::remove(temp_ / "model.safetensors.index.json");
  EXPECT_EQ(refusal(0), "load_attention: " + temp_.path().string() +
                            ": got neither model.safetensors nor model.safetensors.index.json, "
                            "expected a folder with one of them");
  EXPECT_TRUE(std::filesystem::exists(temp_ / kFirst));
  std::filesystem::remove(temp_ / "config.json");
  EXPECT_EQ(refusal(0),
            "load_attention: " + (temp_ / "config.json").string() +
                ": got \"No such file or directory\", expected a file that can be read");
}

TEST_F(ModelTensors, AFileThatIsShortenedMeanwhile) {
  write_model(temp_.path(), setup_, DType::kF32);
  const ShardedSafetensors weights = ShardedSafetensors::open(temp_.path());
  const ModelDescription model = describe_model(temp_.path());
  std::filesystem::resize_file(temp_ / "model.safetensors", 3000);
  const std::string message =
      error_of([&] { load_attention(host_context(), weights, model, 1); }, ErrorCode::kIo);
  EXPECT_NE(message.find("got the end of the file"), std::string::npos) << message;
}

TEST_F(ModelTensors, FamiliesThatThereAreNot) {
  write_model(temp_.path(), setup_, DType::kF32);
  ModelDescription model = describe_model(temp_.path());
  model.family = "mine";
  const std::string expected =
      "family: got \"mine\", expected one of "
      "bert, bloom, cohere, deepseek_v2, deepseek_v3, falcon, gemma2, gemma3_text, gpt2, "
      "gpt_bigcode, "
      "gpt_neox, gpt_oss, ladon_latent, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, "
      "qwen3_moe";
  EXPECT_EQ(
      error_of(
          [&] { load_attention(host_context(), ShardedSafetensors::open(temp_.path()), model, 0); },
          ErrorCode::kUnsupported),
      "load_attention: " + expected);
  const auto layer = load_attention(host_context(), temp_.path(), 0);
  EXPECT_EQ(error_of([&] { attention_tensors(*layer, "mine", 0); }, ErrorCode::kUnsupported),
            "attention_tensors: " + expected);
  EXPECT_EQ(error_of([&] { attention_tensors(*layer, "llama", -1); }),
            "attention_tensors: layer_index: got -1, expected 0 or more");
}

// ---- layers that a family has no place for ---------------------------------------------------

TEST(SavingLayers, ThatDoNotFitTheFamily) {
  using Options = MultiHeadAttentionOptions;
  const Options plain{.embed_dim = 12, .num_heads = 4, .num_kv_heads = 2, .head_dim = 4};
  const auto saving = [](const Options& options, const std::string& family) {
    const std::string message =
        error_of([&] { attention_tensors(MultiHeadAttention(options), family, 0); });
    const std::string start = "attention_tensors: layer: ";
    EXPECT_TRUE(message.starts_with(start)) << message;
    return message.substr(std::min(start.size(), message.size()));
  };
  const auto with = [&](auto&& change) {
    Options options = plain;
    change(options);
    return options;
  };
  EXPECT_NO_THROW(attention_tensors(MultiHeadAttention(plain), "llama", 7));
  EXPECT_EQ(saving(with([](Options& o) { o.qk_norm = true; }), "llama"),
            "got a q/k norm, expected none in family llama");
  EXPECT_EQ(saving(plain, "qwen3"), "got no q/k norm, expected one in family qwen3");
  EXPECT_EQ(saving(with([](Options& o) { o.sinks = true; }), "llama"),
            "got sinks, expected none in family llama");
  EXPECT_EQ(saving(plain, "gpt_oss"), "got no sinks, expected them in family gpt_oss");
  EXPECT_EQ(saving(with([](Options& o) { o.key_dim = 5; }), "llama"),
            "got keys or values of another width than the queries, expected one width in family "
            "llama");
  EXPECT_EQ(saving(with([](Options& o) { o.query_bias = true; }), "llama"),
            "got biases for some of q, k and v, expected all of them or none in family llama");
  EXPECT_EQ(saving(with([](Options& o) { o.query_bias = true; }), "mistral"),
            "got q_proj.bias, expected none in family mistral");
  EXPECT_EQ(saving(plain, "qwen2"), "got no q_proj.bias, expected one in family qwen2");
  EXPECT_EQ(saving(with([](Options& o) { o.out_bias = true; }), "mistral"),
            "got out_proj.bias, expected none in family mistral");
  EXPECT_EQ(saving(plain, "falcon"),
            "got a head_dim of 4, expected embed_dim / num_heads in family falcon");
  Options biased{.embed_dim = 12,
                 .num_heads = 4,
                 .num_kv_heads = 2,
                 .query_bias = true,
                 .key_bias = true,
                 .value_bias = true,
                 .out_bias = true};
  EXPECT_EQ(saving(biased, "bloom"), "got 2 KV heads, expected 4 in family bloom");
  EXPECT_EQ(saving(biased, "gpt_bigcode"), "got 2 KV heads, expected 1 or 4 in family gpt_bigcode");
  EXPECT_EQ(attention_tensors(MultiHeadAttention(biased), "falcon", 3).front().name,
            "transformer.h.3.self_attention.query_key_value.weight");
}

}  // namespace
}  // namespace ladon::test
