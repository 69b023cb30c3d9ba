// describe_model(): what configs say, in old and in new style, and every refusal with its message.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "ladon/alibi.h"
#include "ladon/checkpoint.h"
#include "models/model_folder.h"
#include "support/error_of.h"

namespace ladon::test {
namespace {

const MultiHeadAttentionOptions& layer_of(const ModelDescription& model, std::size_t layer) {
  return std::get<MultiHeadAttentionOptions>(model.layers.at(layer));
}

/// A folder whose config is written anew by each call.
class ModelConfig : public testing::Test {
 protected:
  ModelDescription describe(const std::string& config, std::vector<std::string> ignored = {}) {
    write_bytes(temp_ / "config.json", config);
    return describe_model(temp_.path(), {.ignored_fields = std::move(ignored)});
  }
  /// The message, without what is the same in all of them.
  std::string refusal(const std::string& config, ErrorCode code = ErrorCode::kIo) {
    const std::string message = error_of([&] { describe(config); }, code);
    const std::string start = "describe_model: " + (temp_ / "config.json").string() + ": ";
    EXPECT_TRUE(message.starts_with(start)) << message;
    return message.substr(std::min(start.size(), message.size()));
  }
  std::string unsupported(const std::string& config) {
    return refusal(config, ErrorCode::kUnsupported);
  }

  TempFolder temp_;
};

/// A sound Llama's config with more fields, or with one of its own replaced.
std::string llama(const std::string& more = "", const std::string& instead_of = "",
                  const std::string& by = "") {
  std::string config = R"({"model_type":"llama","hidden_size":32,"num_attention_heads":4,)"
                       R"("num_key_value_heads":2,"num_hidden_layers":3)";
  if (!instead_of.empty()) {
    const std::size_t at = config.find("\"" + instead_of + "\"");
    const std::size_t end = std::min(config.find(',', at), config.size());
    config.replace(at, end - at, by);
  }
  return config + (more.empty() ? "" : ",") + more + "}";
}

TEST_F(ModelConfig, IsDescribedWithoutWeights) {
  const ModelDescription model = describe(llama(R"("torch_dtype":"bfloat16")"));
  EXPECT_EQ(model.family, "llama");
  EXPECT_EQ(model.num_layers, 3);
  EXPECT_EQ(model.embed_dim, 32);
  EXPECT_EQ(model.num_heads, 4);
  EXPECT_EQ(model.num_kv_heads, 2);
  EXPECT_EQ(model.head_dim, 8);
  EXPECT_EQ(model.dtype, DType::kBF16);
  ASSERT_EQ(model.layers.size(), 3U);
  EXPECT_EQ(layer_of(model, 2).head_dim, 8);
  EXPECT_TRUE(layer_of(model, 2).causal);
  EXPECT_EQ(layer_of(model, 0).rope->base, 10000);
  EXPECT_EQ(describe(llama(R"("dtype":"float32")")).dtype, DType::kF32);
  EXPECT_EQ(describe(llama(R"("torch_dtype":"float8_e4m3fn")")).dtype, std::nullopt);
  EXPECT_EQ(describe(llama()).dtype, std::nullopt);
}

TEST_F(ModelConfig, WindowsScalesAndDropoutOfLayers) {
  const auto windows = [](const ModelDescription& model) {
    std::string text;
    for (const LayerOptions& layer : model.layers) {
      const auto window = std::get<MultiHeadAttentionOptions>(layer).window_left;
      text += window ? std::to_string(*window) + " " : "- ";
    }
    return text;
  };
  EXPECT_EQ(windows(describe(family_case("mistral").config)), "3 3 ");
  EXPECT_EQ(windows(describe(family_case("mistral_full").config)), "- - ");
  EXPECT_EQ(windows(describe(family_case("qwen2").config)), "- 2 2 ");
  EXPECT_EQ(windows(describe(family_case("qwen2_full").config)), "- - - ");
  EXPECT_EQ(windows(describe(family_case("gemma2").config)), "3 - 3 ");
  EXPECT_EQ(windows(describe(family_case("gpt_oss").config)), "- 4 - ");
  const ModelDescription gpt2 = describe(family_case("gpt2").config);
  EXPECT_DOUBLE_EQ(*layer_of(gpt2, 0).scale, 1 / std::sqrt(6.0));
  EXPECT_DOUBLE_EQ(*layer_of(gpt2, 1).scale, 1 / std::sqrt(6.0) / 2);
  EXPECT_EQ(layer_of(gpt2, 1).dropout, 0.1);
  EXPECT_EQ(layer_of(describe(family_case("bloom").config), 1).alibi_slopes, alibi_slopes(6));
  EXPECT_FALSE(layer_of(describe(family_case("falcon_alibi").config), 0).rope.has_value());
}

TEST_F(ModelConfig, RopeOfOldAndNewStyle) {
  const std::string yarn =
      R"("factor":4,"attention_factor":1.5,"mscale":0.5,"mscale_all_dim":0.25,"beta_fast":null})";
  const auto rope = [&](const std::string& fields) {
    return *layer_of(describe(llama(fields)), 0).rope;
  };
  const RopeOptions old_style = rope(
      R"("rope_theta":500,"max_position_embeddings":128,"rope_scaling":{"type":"yarn",)" + yarn);
  EXPECT_EQ(old_style.base, 500);
  EXPECT_EQ(old_style.scaling.kind, RopeScaling::kYarn);
  EXPECT_EQ(old_style.scaling.original_context, 128);
  EXPECT_EQ(old_style.scaling.attention_factor, 1.5);
  EXPECT_EQ(old_style.scaling.beta_fast, 32);
  const RopeOptions new_style = rope(
      R"("max_position_embeddings":128,"rope_parameters":{"rope_type":"yarn","rope_theta":500,)" +
      yarn);
  EXPECT_EQ(new_style.base, old_style.base);
  EXPECT_EQ(new_style.scaling, old_style.scaling);
  EXPECT_EQ(rope(R"("rope_scaling":{"rope_type":"default"})").scaling.kind, RopeScaling::kNone);
  EXPECT_EQ(rope(R"("rope_scaling":null,"rope_parameters":null)").base, 10000);
  EXPECT_EQ(rope(R"("original_max_position_embeddings":64,"max_position_embeddings":128,
    "rope_scaling":{"type":"yarn","factor":2})")
                .scaling.original_context,
            64);
  // One for each type of layer.
  const ModelDescription model = describe(R"({"model_type":"gpt_oss","head_dim":8,"hidden_size":16,
    "num_attention_heads":2,"num_key_value_heads":1,"num_hidden_layers":2,"sliding_window":4,
    "rope_parameters":{"full_attention":{"rope_type":"linear","factor":2,"rope_theta":7},
    "sliding_attention":{"rope_type":"default","rope_theta":5}}})");
  EXPECT_EQ(layer_of(model, 0).rope->base, 5);
  EXPECT_EQ(layer_of(model, 1).rope->base, 7);
  EXPECT_EQ(layer_of(model, 1).rope->scaling.kind, RopeScaling::kLinear);
}

TEST_F(ModelConfig, FieldsOfSeveralNamesAgreeOrAreRefused) {
  EXPECT_EQ(describe(R"({"model_type":"bloom","hidden_size":8,"n_embed":8,"n_head":2,"n_layer":1})")
                .embed_dim,
            8);
  EXPECT_EQ(
      refusal(R"({"model_type":"bloom","hidden_size":8,"n_embed":16,"n_head":2,"n_layer":1})"),
      "n_embed: got 16, expected 8 as in hidden_size");
  EXPECT_EQ(refusal(llama(R"("rope_theta":5,"rope_parameters":{"rope_theta":6})")),
            "rope_parameters.rope_theta: got 6, expected 5 as in the rope_theta next to it");
}

TEST_F(ModelConfig, MissingFields) {
  constexpr const char* kSize = ": got none, expected a whole number from 1 to ";
  EXPECT_EQ(refusal(llama("", "hidden_size", "\"a\":1")),
            "hidden_size" + (kSize + std::to_string(1 << 24)));
  EXPECT_EQ(refusal(llama("", "num_attention_heads", "\"a\":1")),
            std::string("num_attention_heads") + kSize + "4096");
  EXPECT_EQ(refusal(llama("", "num_hidden_layers", "\"a\":1")),
            std::string("num_hidden_layers") + kSize + "4096");
  EXPECT_EQ(refusal("{}"),
            "model_type: got none, expected one of "
            "bert, bloom, cohere, deepseek_v2, deepseek_v3, falcon, gemma2, gemma3_text, gpt2, "
            "gpt_bigcode, "
            "gpt_neox, gpt_oss, ladon_latent, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, "
            "qwen3_moe");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":{"type":"linear"})")),
            "rope_scaling.factor: got none, expected a number");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":{"type":"llama3","factor":2,"low_freq_factor":1})")),
            "rope_scaling.high_freq_factor: got none, expected a number");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":{"type":"yarn","factor":2})")),
            "rope_scaling.original_max_position_embeddings: got none, expected a number here or as "
            "max_position_embeddings");
  const auto without = [&](const std::string& name, const std::string& field) {
    std::string config = family_case(name).config;
    const std::size_t at = config.find("\"" + field + "\"");
    return refusal(config.replace(at, field.size() + 2, "\"x\""));
  };
  EXPECT_EQ(without("mistral", "sliding_window"),
            "sliding_window: got none, expected a whole number, or null for none");
  EXPECT_EQ(without("mistral", "num_key_value_heads"),
            std::string("num_key_value_heads") + kSize + "4096");
  EXPECT_EQ(without("qwen2", "max_window_layers"),
            "max_window_layers: got none, expected a number");
  EXPECT_EQ(without("qwen2", "sliding_window"),
            std::string("sliding_window") + kSize + "1099511627776");
  EXPECT_EQ(without("qwen3", "head_dim"), std::string("head_dim") + kSize + "65536");
  EXPECT_EQ(without("gemma2", "query_pre_attn_scalar"),
            "query_pre_attn_scalar: got none, expected a number");
  EXPECT_EQ(without("gemma2", "attn_logit_softcapping"),
            "attn_logit_softcapping: got none, expected a number, or null for none");
  EXPECT_EQ(without("gpt_oss", "rope_scaling"),
            "rope_parameters: got none, expected it, or rope_scaling");
}

TEST_F(ModelConfig, WrongKinds) {
  const std::string sizes = ", expected a whole number from 1 to 4096";
  const auto heads = [&](const std::string& value) {
    return refusal(llama("", "num_attention_heads", "\"num_attention_heads\":" + value));
  };
  EXPECT_EQ(heads("\"4\""), "num_attention_heads: got the text \"4\"" + sizes);
  EXPECT_EQ(heads("4.0"), "num_attention_heads: got 4.0" + sizes);
  EXPECT_EQ(heads("4.5"), "num_attention_heads: got 4.5" + sizes);
  EXPECT_EQ(heads("0"), "num_attention_heads: got 0" + sizes);
  EXPECT_EQ(heads("-4"), "num_attention_heads: got -4" + sizes);
  EXPECT_EQ(heads("true"), "num_attention_heads: got true" + sizes);
  EXPECT_EQ(heads("[4]"), "num_attention_heads: got an array" + sizes);
  EXPECT_EQ(heads("{}"), "num_attention_heads: got an empty object" + sizes);
  EXPECT_EQ(heads("18446744073709551615"), "num_attention_heads: got 18446744073709551616" + sizes);
  EXPECT_EQ(heads("99999999999999999999999"), "num_attention_heads: got 1e+23" + sizes);
  EXPECT_EQ(refusal(llama(R"("attention_bias":1)")),
            "attention_bias: got 1, expected true or false");
  EXPECT_EQ(refusal(llama(R"("rope_theta":"big")")),
            "rope_theta: got the text \"big\", expected a number");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":7)")), "rope_scaling: got 7, expected an object");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":{"type":3})")),
            "rope_scaling.type: got 3, expected a text");
  EXPECT_EQ(refusal(llama(R"("rope_parameters":{"full_attention":3})")),
            "rope_parameters.full_attention: got 3, expected an object");
  EXPECT_EQ(refusal(R"({"model_type":["llama"]})"), "model_type: got an array, expected a text");
  EXPECT_EQ(refusal(llama(R"("torch_dtype":5)")), "torch_dtype: got 5, expected a text");
  const auto types = [&](const std::string& value, ErrorCode code = ErrorCode::kIo) {
    std::string config = family_case("gpt_oss").config;
    const std::size_t at = config.find("[\"full");
    return refusal(config.replace(at, config.find(']', at) + 1 - at, value), code);
  };
  const std::string expected = "expected an array of full_attention and sliding_attention";
  EXPECT_EQ(types("true"), "layer_types: got true, " + expected);
  EXPECT_EQ(types("[1,2,3]"), "layer_types: got 1, " + expected);
  EXPECT_EQ(types(R"(["full_attention"])"),
            "layer_types: got 1 of them, expected one for each of 3 layers");
  EXPECT_EQ(
      types(R"(["full_attention","linear_attention","full_attention"])", ErrorCode::kUnsupported),
      "layer_types: got the text \"linear_attention\", " + expected);
}

TEST_F(ModelConfig, OptionsThatMakeNoLayer) {
  EXPECT_EQ(refusal(llama("", "num_key_value_heads", R"("num_key_value_heads":3)")),
            "MultiHeadAttention: num_kv_heads: got 3, expected a divisor of num_heads = 4");
  EXPECT_EQ(refusal(llama("", "hidden_size", R"("hidden_size":30)")),
            "MultiHeadAttention: num_heads: got 4, expected a divisor of embed_dim = 30 because "
            "head_dim is not given");
  EXPECT_EQ(
      refusal(llama(R"("head_dim":7)")),
      "MultiHeadAttention: rope.rotary_dim: got 0 for all of a head_dim of 7, expected an even "
      "number");
  EXPECT_EQ(refusal(llama(R"("rope_theta":-1)")),
            "MultiHeadAttention: rope.base: got -1, expected a positive finite number");
  EXPECT_EQ(refusal(llama(R"("attention_dropout":1.5)")),
            "MultiHeadAttention: dropout: got 1.5, expected a number in [0, 1)");
  EXPECT_EQ(refusal(R"({"model_type":"gemma2","hidden_size":8,"num_attention_heads":2,"head_dim":4,
    "num_key_value_heads":1,"num_hidden_layers":1,"sliding_window":4,"query_pre_attn_scalar":0,
    "attn_logit_softcapping":null})"),
            "query_pre_attn_scalar: got 0, expected a positive number");
  EXPECT_EQ(refusal(llama(R"("rope_scaling":{"type":"linear","factor":2},"rope_parameters":{})")),
            "rope_parameters: got it together with rope_scaling, expected one of them");
  EXPECT_EQ(refusal(R"({"model_type":"gpt_bigcode","n_embd":8,"n_head":2,"n_layer":1,
    "num_key_value_heads":2})"),
            "num_key_value_heads: got 2, expected 1 by multi_query");
  EXPECT_EQ(refusal(R"({"model_type":"qwen2","hidden_size":8,"num_attention_heads":2,
    "num_key_value_heads":1,"num_hidden_layers":1,"layer_types":["sliding_attention"]})"),
            "layer_types: got sliding_attention, expected full_attention alone because "
            "use_sliding_window is not true");
  EXPECT_EQ(refusal(R"({"model_type":"gpt_oss","head_dim":8,"hidden_size":16,
    "num_attention_heads":2,"num_key_value_heads":1,"num_hidden_layers":2,"sliding_window":4,
    "rope_parameters":{"full_attention":{}}})"),
            "rope_parameters: got none for sliding_attention, expected one for each type of layer");
  EXPECT_EQ(refusal(llama(R"("rope_parameters":{"full_attention":{"rope_theta":7}})")),
            "rope_parameters: got one for each type of layer, expected one for all layers");
}

TEST_F(ModelConfig, WhatLadonDoesNotHonourIsNamed) {
  EXPECT_EQ(unsupported(R"({"model_type":"mamba"})"),
            "model_type: got \"mamba\", expected one of "
            "bert, bloom, cohere, deepseek_v2, deepseek_v3, falcon, gemma2, gemma3_text, gpt2, "
            "gpt_bigcode, "
            "gpt_neox, gpt_oss, ladon_latent, llama, mistral, mixtral, olmo2, phi3, qwen2, qwen3, "
            "qwen3_moe");
  const std::string off =
      ", expected it to be off: Ladon does not honour it (name it in "
      "ignored_fields if it makes no difference)";
  for (const std::string name : {"is_encoder_decoder", "add_cross_attention", "rope_interleaved"}) {
    EXPECT_EQ(unsupported(llama("\"" + name + "\":true")), name + ": got true" + off);
    EXPECT_NO_THROW(describe(llama("\"" + name + "\":false")));
  }
  EXPECT_EQ(unsupported(llama(R"("auto_map":{"AutoModel":"modeling_mine.Mine"})")),
            "auto_map: got an object" + off);
  EXPECT_EQ(unsupported(llama(R"("pruned_heads":{"1":[0]})")), "pruned_heads: got an object" + off);
  EXPECT_NO_THROW(describe(llama(R"("pruned_heads":{})")));
  EXPECT_EQ(unsupported(llama(R"("rope_scaling":{"factor":2,"type":"mrope"})")),
            "rope_scaling.type: got \"mrope\", expected default, linear, llama3, yarn, dynamic or "
            "longrope");
  EXPECT_EQ(unsupported(llama(R"("partial_rotary_factor":0.5)")),
            "partial_rotary_factor: got 0.5, expected 1: Ladon does not honour it here");
  EXPECT_EQ(unsupported(llama(R"("rope_parameters":{"partial_rotary_factor":0.25})")),
            "rope_parameters.partial_rotary_factor: got 0.25, expected 1: Ladon does not honour it "
            "here");
  const std::string bert = R"({"model_type":"bert","hidden_size":8,"num_attention_heads":2,)"
                           R"("num_hidden_layers":1,)";
  EXPECT_EQ(
      unsupported(bert + R"("position_embedding_type":"relative_key"})"),
      "position_embedding_type: got \"relative_key\", expected absolute: Ladon does not honour "
      "others");
  EXPECT_EQ(unsupported(bert + R"("add_cross_attention":true})"),
            "add_cross_attention: got true" + off);
  EXPECT_EQ(unsupported(bert + R"("rope_theta":10000})").substr(0, 24),
            "\"rope_theta\": got 10000,");
}

TEST_F(ModelConfig, UnknownFieldsThatMayConcernAttention) {
  const std::string unknown =
      ", expected only fields that Ladon knows where they may concern attention (name it in "
      "ignored_fields if it does not)";
  for (const std::string name :
       {"attn_logit_softcapping", "use_qk_norm", "qk_layernorm", "clip_qkv", "sliding_window",
        "no_rope_layers", "attention_multiplier", "layer_types", "query_pre_attn_scalar", "alibi",
        "kv_lora_rank", "attention_sink_size", "mrope_section", "use_bidirectional_x"}) {
    EXPECT_EQ(unsupported(llama("\"" + name + "\":7")), "\"" + name + "\": got 7" + unknown);
    EXPECT_NO_THROW(describe(llama("\"" + name + "\":null"))) << name;
    EXPECT_NO_THROW(describe(llama("\"" + name + "\":7"), {name})) << name;
  }
  // Of rope's own object every field counts.
  EXPECT_EQ(unsupported(llama(R"("rope_scaling":{"type":"linear","factor":2,"origin":"x"})")),
            "\"rope_scaling.origin\": got the text \"x\"" + unknown);
  EXPECT_NO_THROW(describe(llama(R"("rope_scaling":{"type":"linear","factor":2,"origin":"x"})"),
                           {"rope_scaling.origin"}));
  EXPECT_NO_THROW(describe(llama(R"("auto_map":{"AutoModel":"m.M"})"), {"auto_map"}));
  // What cannot concern it is passed over, whatever it holds.
  EXPECT_NO_THROW(describe(llama(R"("id2label":{"0":{"deep":[[[1]]]}},"vocab_size":"big")")));
}

TEST_F(ModelConfig, HostileFiles) {
  const auto broken = [&](const std::string& text) { return refusal(text); };
  const std::string not_object =
      "config: got text that is not a JSON object, expected one that begins with '{'";
  for (const std::string text : {"", "[]", "7", "\"x\"", " ", "\xef\xbb\xbf{}"}) {
    EXPECT_EQ(broken(text), not_object) << text;
  }
  EXPECT_EQ(broken(std::string("{}\0", 3)), not_object);
  EXPECT_EQ(broken(R"({"model_type":)"),
            "got invalid JSON or UTF-8 at byte 15 of the config, expected a JSON object");
  EXPECT_EQ(broken(R"({"model_type":"llama"} x)").substr(0, 16), "got invalid JSON");
  EXPECT_EQ(broken(R"({"rope_theta":1e999})").substr(0, 16), "got invalid JSON");
  EXPECT_EQ(broken(R"({"rope_theta":NaN})").substr(0, 16), "got invalid JSON");
  EXPECT_EQ(broken("{\"a\":\"\xff\"}").substr(0, 16), "got invalid JSON");
  EXPECT_EQ(broken(llama(R"("hidden_size":32)")),
            "\"hidden_size\": got it twice, expected it once");
  EXPECT_EQ(broken(llama(R"("rope_scaling":{"type":"linear","type":"yarn"})")),
            "\"type\": got it twice, expected it once");
  // Deep: neither the stack nor the memory minds.
  const std::string deep(1'000'000, '[');
  EXPECT_EQ(broken("{\"x\":" + deep).substr(0, 16), "got invalid JSON");
  EXPECT_NO_THROW(describe(llama("\"x\":" + deep + std::string(deep.size(), ']'))));
  EXPECT_EQ(broken(llama("\"layer_types\":" + deep)).substr(0, 16), "got invalid JSON");
  EXPECT_EQ(unsupported(llama("\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"x\":" + deep +
                              std::string(deep.size(), ']') + "}"))
                .substr(0, 35),
            "\"rope_scaling.x\": got an array, exp");
  std::string many = "[0";
  for (int i = 0; i < 100'000; ++i) many += ",0";
  EXPECT_EQ(broken(llama("\"layer_types\":" + many + "]")),
            "got more than 100000 values, expected a model's config");
  std::string large = llama("\"x\":\"" + std::string(17U << 20U, 'x') + "\"");
  EXPECT_EQ(broken(large), "got a config of " + std::to_string(large.size()) +
                               " bytes, expected at most 16777216");
  // Control characters of a name do not reach a terminal.
  EXPECT_EQ(unsupported(llama("\"attn\\u001b[31m\":1")).substr(0, 21), "\"attn\\x1b[31m\": got 1");
  std::filesystem::remove(temp_ / "config.json");
  EXPECT_EQ(error_of([&] { describe_model(temp_.path()); }, ErrorCode::kIo),
            "describe_model: " + (temp_ / "config.json").string() +
                ": got \"No such file or directory\", expected a file that can be read");
}

}  // namespace
}  // namespace ladon::test
