// DeepSeek's tensors: wrong ones, quantised ones, and layers that the families cannot hold, each
// with its message; and descriptions that mix kinds of layers.
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "models/model_folder.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

constexpr const char* kPrefix = "model.layers.0.self_attn.";

class LatentTensors : public testing::Test {
 protected:
  std::string refusal() {
    return error_of([&] { load_attention(host_context(), temp_.path(), 0); }, ErrorCode::kIo);
  }
  /// What loading says of a tensor of layer 0.
  std::string about(const std::string& tensor, const std::string& what, bool in_folder = false) {
    const std::filesystem::path path = in_folder ? temp_.path() : temp_ / "model.safetensors";
    return "load_attention: " + path.string() + ": tensor \"" + kPrefix + tensor + "\": " + what;
  }
  void replace(const std::string& tensor, const Dims& shape) {
    setup_.tensors.insert_or_assign(kPrefix + tensor, TensorMaker(1).make(shape, 1));
  }

  FamilyCase setup_ = family_case("deepseek_v3");
  TempFolder temp_;
};

TEST_F(LatentTensors, MissingOnes) {
  for (const auto& [name, shape] :
       {std::pair("q_a_layernorm.weight", "[12]"), std::pair("kv_b_proj.weight", "[33, 10]"),
        std::pair("kv_a_proj_with_mqa.bias", "[18]")}) {
    FamilyCase without = family_case(setup_.name);
    without.tensors.erase(kPrefix + std::string(name));
    write_model(temp_.path(), without, DType::kF32);
    EXPECT_EQ(refusal(), about(name, std::string("got none, expected one of shape ") + shape,
                               /*in_folder=*/true));
    EXPECT_NO_THROW(load_attention(host_context(), temp_.path(), 1));
  }
}

TEST_F(LatentTensors, UnexpectedOnes) {
  // A direct query next to the one of low rank; biases that these projections never have.
  for (const std::string name : {"q_proj.weight", "q_b_proj.bias", "kv_b_proj.bias", "k_norm"}) {
    FamilyCase more = family_case(setup_.name);
    more.tensors.emplace(kPrefix + name, TensorMaker(1).make({42}, 1));
    write_model(temp_.path(), more, DType::kF32);
    EXPECT_EQ(refusal(),
              about(name,
                    "got a tensor that is not expected, expected only the attention's own "
                    "under \"model.layers.0.self_attn.\""));
  }
  setup_.tensors.emplace(kPrefix + std::string("rotary_emb.inv_freq"), TensorMaker(1).make({4}, 1));
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_NO_THROW(load_attention(host_context(), temp_.path(), 0));
}

TEST_F(LatentTensors, MisshapenOnes) {
  replace("kv_a_proj_with_mqa.weight", {10, 20});  // without the rope key's rows
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_EQ(refusal(), about("kv_a_proj_with_mqa.weight", "got [10, 20], expected [18, 20]"));
  replace("kv_a_proj_with_mqa.weight", {18, 20});
  replace("kv_a_layernorm.weight", {18});
  write_model(temp_.path(), setup_, DType::kF32);
  EXPECT_EQ(refusal(), about("kv_a_layernorm.weight", "got [18], expected [10]"));
}

TEST_F(LatentTensors, QuantisedOnes) {
  // As DeepSeek-V3 was published: fp8 weights with their scales next to them.
  std::string header = "{";
  std::string data;
  const auto add = [&](const std::string& name, const std::string& dtype, const Dims& dims,
                       std::size_t width) {
    std::string shape;
    std::size_t bytes = width;
    for (const std::int64_t size : dims) {
      shape += (shape.empty() ? "" : ",") + std::to_string(size);
      bytes *= static_cast<std::size_t>(size);
    }
    header += (header.size() > 1 ? ",\"" : "\"") + name + R"(":{"dtype":")" + dtype +
              R"(","shape":[)" + shape + R"(],"data_offsets":[)" + std::to_string(data.size()) +
              "," + std::to_string(data.size() + bytes) + "]}";
    data.append(bytes, '\0');
  };
  for (const auto& [name, tensor] : setup_.tensors) {
    const bool quantised = name.ends_with("proj.weight") || name.ends_with("mqa.weight");
    add(name, quantised ? "F8_E4M3" : "BF16", tensor.shape(), quantised ? 1 : 2);
    if (quantised) add(name + "_scale_inv", "F32", {1, 1}, 4);
  }
  write_bytes(temp_ / "config.json", setup_.config);
  write_bytes(temp_ / "model.safetensors", safetensors_bytes(header + "}", data));
  EXPECT_EQ(refusal(), about("q_a_proj.weight",
                             "got dtype F8_E4M3, expected F64, F32, F16 or BF16: quantised weights "
                             "must be converted first"));
}

TEST_F(LatentTensors, DescriptionsThatMixKinds) {
  write_model(temp_.path(), setup_, DType::kF32);
  const ShardedSafetensors weights = ShardedSafetensors::open(temp_.path());
  ModelDescription model = describe_model(temp_.path());
  const auto message = [&] {
    return error_of([&] { load_attention(host_context(), weights, model, 0); });
  };
  model.family = "llama";
  EXPECT_EQ(message(),
            "load_attention: model.layers: got options of another kind of layer, expected those "
            "of family llama");
  model.family = "deepseek_v2";
  EXPECT_NO_THROW(load_attention(host_context(), weights, model, 0));
  model.layers[0] = MultiHeadAttentionOptions{.embed_dim = 20, .num_heads = 2};
  EXPECT_EQ(message(),
            "load_attention: model.layers: got options of another kind of layer, expected those "
            "of family deepseek_v2");
}

TEST(SavingLatentLayers, ThatDoNotFitTheFamily) {
  using Options = LatentAttentionOptions;
  const Options plain{
      .embed_dim = 12, .num_heads = 2, .query_rank = 5, .kv_rank = 6, .nope_dim = 4, .rope_dim = 2};
  const auto saving = [&](const std::function<void(Options&)>& change) {
    Options options = plain;
    change(options);
    const std::string message =
        error_of([&] { attention_tensors(LatentAttention::zeros(options), "deepseek_v2", 0); });
    const std::string start = "attention_tensors: layer: ";
    EXPECT_TRUE(message.starts_with(start)) << message;
    return message.substr(std::min(start.size(), message.size()));
  };
  EXPECT_EQ(attention_tensors(LatentAttention(plain), "deepseek_v3", 7).front().name,
            "model.layers.7.self_attn.q_a_proj.weight");
  EXPECT_EQ(saving([](Options& o) { o.rope_dim = 0; }),
            "got no rope, expected it in family deepseek_v2");
  EXPECT_EQ(saving([](Options& o) { o.kv_norm = false; }),
            "got a latent without a norm, expected norms in family deepseek_v2");
  EXPECT_EQ(saving([](Options& o) { o.query_norm = false; }),
            "got a latent without a norm, expected norms in family deepseek_v2");
  EXPECT_EQ(saving([](Options& o) { o.kv_bias = true; }),
            "got some of the biases, expected all of them or none in family deepseek_v2");
  EXPECT_EQ(saving([](Options& o) { o.query_bias = true; }),
            "got some of the biases, expected all of them or none in family deepseek_v2");
  EXPECT_EQ(saving([](Options& o) {
              o.query_rank = 0;
              o.query_bias = true;
            }),
            "got q_proj.bias, expected none in family deepseek_v2");
  EXPECT_EQ(error_of([&] { attention_tensors(LatentAttention(plain), "llama", 0); }),
            "attention_tensors: layer: got a LatentAttention, expected a MultiHeadAttention");
  EXPECT_EQ(error_of([] { attention_tensors(MultiHeadAttention::mha(8, 2), "deepseek_v3", 0); }),
            "attention_tensors: layer: got a MultiHeadAttention, expected a LatentAttention");
}

TEST(LatentZeros, HaveZeroWeightsAndUnitNorms) {
  const LatentAttentionOptions options{.embed_dim = 12,
                                       .num_heads = 2,
                                       .query_rank = 5,
                                       .kv_rank = 6,
                                       .nope_dim = 4,
                                       .rope_dim = 2,
                                       .kv_bias = true};
  const LatentAttention zeros = LatentAttention::zeros(options);
  const LatentAttention drawn(options, 3);
  ASSERT_EQ(zeros.named_parameters().size(), drawn.named_parameters().size());
  for (std::size_t i = 0; i < zeros.named_parameters().size(); ++i) {
    const Parameter& parameter = zeros.named_parameters()[i];
    EXPECT_EQ(parameter.name, drawn.named_parameters()[i].name);
    EXPECT_EQ(parameter.value.shape(), drawn.named_parameters()[i].value.shape());
    const float expected = parameter.name.find("layernorm") == std::string::npos ? 0.0F : 1.0F;
    for (std::int64_t n = 0; n < parameter.value.num_elements(); ++n) {
      ASSERT_EQ(parameter.value.data_as<float>()[n], expected) << parameter.name;
    }
  }
}

}  // namespace
}  // namespace ladon::test
