// DeepSeek's families beyond what families_test.cpp asks of every family: both forms against plain
// attention, layers spoilt one setting at a time, and every refusal with its message.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/io_support.h"
#include "ladon/checkpoint.h"
#include "models/family_runs.h"
#include "models/model_folder.h"
#include "support/error_of.h"
#include "support/host_context.h"

namespace ladon::test {
namespace {

using Options = LatentAttentionOptions;

const LatentAttention& as_latent(const std::unique_ptr<AttentionLayer>& layer) {
  return dynamic_cast<const LatentAttention&>(*layer);
}

class LatentFamilies : public testing::TestWithParam<std::string> {
 protected:
  FamilyCase setup_ = family_case(GetParam());
  TempFolder temp_;
};

TEST_P(LatentFamilies, BothFormsAgreeWithPlainAttention) {
  for (const DType dtype : {DType::kF64, DType::kF32}) {
    write_model(temp_.path(), setup_, dtype);
    const Tensor x = input_of(setup_);
    const Tensor converted = Tensor::copy_of(host_context(), x, dtype);
    double worst = 0;
    for (int index = 0; index < setup_.num_layers; ++index) {
      LatentAttention layer = as_latent(load_attention(host_context(), temp_.path(), index));
      const std::vector<double> expected = plain_output(setup_, index, x);
      for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
        layer.set_form(form);
        for (const Context& context : test_contexts()) {
          layer.to(context);
          for (const WayToRun& run : runs(context, layer)) {
            SCOPED_TRACE(run.name + ", layer " + std::to_string(index) + ", " + name_of(dtype) +
                         " on " + context.device().to_string());
            const Difference off = difference(run.call(layer, converted), expected);
            EXPECT_LE(off.largest, dtype == DType::kF64 ? 1e-10 : 1e-5 * off.scale);
            worst = std::max(worst, off.largest / off.scale);
          }
        }
      }
    }
    std::printf("%s, %s: %.1e\n", setup_.name.c_str(), name_of(dtype), worst);
  }
}

// ---- spoilt layers ---------------------------------------------------------------------------

/// A layer with these options and the weights of another.
LatentAttention remade(const LatentAttention& layer, const Options& options) {
  LatentAttention fresh = LatentAttention::zeros(options);
  for (Parameter& parameter : fresh.named_parameters()) {
    parameter.value = Tensor::copy_of(host_context(), layer.parameter(parameter.name).value);
  }
  fresh.eval();
  return fresh;
}

/// In every group of `count` rows of a weight (and of its bias), the first `head` rows put last.
void rotate_rows(LatentAttention& layer, const std::string& projection, std::int64_t count,
                 std::int64_t head) {
  for (const std::string kind : {".weight", ".bias"}) {
    if (!layer.has_parameter(projection + kind)) continue;
    Tensor& value = layer.parameter(projection + kind).value;
    const Tensor before = Tensor::copy_of(host_context(), value);
    for (std::int64_t first = 0; first < value.size(0); first += count) {
      copy(host_context(), before.view().slice(0, first, first + head),
           value.view().slice(0, first + count - head, first + count));
      copy(host_context(), before.view().slice(0, first + head, first + count),
           value.view().slice(0, first, first + count - head));
    }
  }
}

/// Changes a layer as a mistake in loading would; false where there is nothing to change.
struct Mutation {
  std::string name;
  std::function<bool(LatentAttention& layer)> spoil;
};

Mutation of_options(const std::string& name, const std::function<bool(Options&)>& change) {
  return {name, [=](LatentAttention& layer) {
            Options options = layer.options();
            if (!change(options)) return false;
            layer = remade(layer, options);
            return true;
          }};
}

Mutation of_weights(const std::string& parameter) {
  return {"no " + parameter, [=](LatentAttention& layer) {
            if (!layer.has_parameter(parameter)) return false;
            Tensor& value = layer.parameter(parameter).value;
            value = Tensor(value.dtype(), value.shape());
            return true;
          }};
}

Mutation of_rows(const std::string& name,
                 const std::function<void(LatentAttention&, const Options&)>& change) {
  return {name, [=](LatentAttention& layer) {
            change(layer, Options(layer.options()));
            return true;
          }};
}

std::string query_of(const Options& o) { return o.query_rank == 0 ? "q_proj" : "q_b_proj"; }

std::vector<Mutation> mutations() {
  const auto is_yarn = [](const Options& o) { return o.rope.scaling.kind == RopeScaling::kYarn; };
  return {
      of_options("the other layout of rope",
                 [](Options& o) {
                   o.rope.layout = o.rope.layout == RopeLayout::kInterleaved
                                       ? RopeLayout::kHalfSplit
                                       : RopeLayout::kInterleaved;
                   return true;
                 }),
      of_options("another base",
                 [](Options& o) {
                   if (!o.rope.frequencies.empty()) return false;
                   o.rope.base *= 3;
                   return true;
                 }),
      of_options("frequencies in another order",
                 [](Options& o) {
                   if (o.rope.frequencies.empty()) return false;
                   std::swap(o.rope.frequencies.front(), o.rope.frequencies.back());
                   return true;
                 }),
      of_options("no magnitude of explicit frequencies",
                 [](Options& o) { return std::exchange(o.rope.magnitude, 1) != 1; }),
      // The scale stays: options are complete.
      of_options("no scaling of rope",
                 [=](Options& o) {
                   const bool yarn = is_yarn(o);
                   o.rope.scaling = {};
                   return yarn;
                 }),
      of_options("no magnitude of rope",
                 [=](Options& o) {
                   const bool has_one =
                       is_yarn(o) && o.rope.scaling.mscale != o.rope.scaling.mscale_all_dim;
                   o.rope.scaling.attention_factor = 1;
                   return has_one;
                 }),
      of_options("a scale without mscale",
                 [=](Options& o) {
                   o.scale = 1 / std::sqrt(static_cast<double>(o.nope_dim + o.rope_dim));
                   return is_yarn(o);
                 }),
      of_options("a scale with mscale once",
                 [=](Options& o) {
                   o.scale = *o.scale / yarn_mscale(40, o.rope.scaling.mscale_all_dim);
                   return is_yarn(o);
                 }),
      of_options("another scale",
                 [](Options& o) {
                   o.scale = 1.3 * *o.scale;
                   return true;
                 }),
      of_options("no norm of the latent",
                 [](Options& o) { return std::exchange(o.kv_norm, false); }),
      of_options("no norm of the query's latent",
                 [](Options& o) { return std::exchange(o.query_norm, false) && o.query_rank > 0; }),
      of_options("rms_norm_eps as epsilon",
                 [](Options& o) {
                   o.norm_epsilon = 0.05;
                   return o.kv_norm;
                 }),
      of_options("other causality",
                 [](Options& o) {
                   o.causal = !o.causal;
                   return true;
                 }),
      of_rows("queries as [rope | nope]",
              [](LatentAttention& layer, const Options& o) {
                rotate_rows(layer, query_of(o), o.nope_dim + o.rope_dim, o.nope_dim);
              }),
      of_rows("query heads in another order",
              [](LatentAttention& layer, const Options& o) {
                rotate_rows(layer, query_of(o), o.num_heads * (o.nope_dim + o.rope_dim),
                            o.nope_dim + o.rope_dim);
              }),
      of_rows("latents as [rope key | latent]",
              [](LatentAttention& layer, const Options& o) {
                rotate_rows(layer, "kv_a_proj_with_mqa", o.kv_rank + o.rope_dim, o.kv_rank);
              }),
      of_rows("values before keys",
              [](LatentAttention& layer, const Options& o) {
                rotate_rows(layer, "kv_b_proj", o.nope_dim + o.value_dim, o.nope_dim);
              }),
      of_rows("key and value heads in another order",
              [](LatentAttention& layer, const Options& o) {
                rotate_rows(layer, "kv_b_proj", o.num_heads * (o.nope_dim + o.value_dim),
                            o.nope_dim + o.value_dim);
              }),
      of_weights("q_a_proj.bias"),
      of_weights("kv_a_proj_with_mqa.bias"),
      of_weights("o_proj.bias"),
  };
}

TEST_P(LatentFamilies, SpoiltLayersDoNotAgree) {
  write_model(temp_.path(), setup_, DType::kF64);
  const Tensor x = input_of(setup_);
  int spoilt = 0;
  double least = 1;
  for (int index = 0; index < setup_.num_layers; ++index) {
    const auto loaded = load_attention(host_context(), temp_.path(), index);
    const std::vector<double> expected = plain_output(setup_, index, x);
    for (const Mutation& mutation : mutations()) {
      LatentAttention layer = as_latent(loaded);
      if (!mutation.spoil(layer)) continue;
      ++spoilt;
      const Difference off = difference(layer.forward(test_context(), x.view()), expected);
      EXPECT_GT(off.largest, 1e-3 * off.scale)
          << mutation.name << ", layer " << index << ": the tolerance is 1e-10";
      least = std::min(least, off.largest / off.scale);
    }
  }
  EXPECT_GT(spoilt, 10 * setup_.num_layers);
  std::printf("%s: %d spoilt layers, off by %.1e at least\n", setup_.name.c_str(), spoilt, least);
}

INSTANTIATE_TEST_SUITE_P(, LatentFamilies, testing::ValuesIn(case_names(/*latent=*/true)),
                         [](const auto& param) { return param.param; });

// ---- configs ---------------------------------------------------------------------------------

class LatentConfig : public testing::Test {
 protected:
  ModelDescription describe(const std::string& config) {
    write_bytes(temp_ / "config.json", config);
    return describe_model(temp_.path());
  }
  std::string refusal(const std::string& config, ErrorCode code = ErrorCode::kIo) {
    const std::string message = error_of([&] { describe(config); }, code);
    const std::string start = "describe_model: " + (temp_ / "config.json").string() + ": ";
    EXPECT_TRUE(message.starts_with(start)) << message;
    return message.substr(std::min(start.size(), message.size()));
  }
  /// The config of a case with a field's name or value replaced.
  static std::string with(const std::string& before, const std::string& after,
                          const std::string& name = "deepseek_v3") {
    std::string config = family_case(name).config;
    const std::size_t at = config.find(before);
    EXPECT_NE(at, std::string::npos) << before;
    return at == std::string::npos ? config : config.replace(at, before.size(), after);
  }

  TempFolder temp_;
};

TEST_F(LatentConfig, IsDescribedWithoutWeights) {
  const ModelDescription model = describe(family_case("deepseek_v3").config);
  EXPECT_EQ(model.family, "deepseek_v3");
  EXPECT_EQ(model.num_layers, 2);
  EXPECT_EQ(model.embed_dim, 20);
  EXPECT_EQ(model.num_heads, 3);
  EXPECT_EQ(model.num_kv_heads, 3);
  EXPECT_EQ(model.head_dim, 14);
  ASSERT_EQ(model.layers.size(), 2U);
  const Options& layer = std::get<Options>(model.layers[1]);
  EXPECT_EQ(layer.query_rank, 12);
  EXPECT_EQ(layer.kv_rank, 10);
  EXPECT_EQ(layer.rope_dim, 8);
  EXPECT_EQ(layer.value_dim, 5);
  EXPECT_EQ(layer.norm_epsilon, 1e-6);  // not rms_norm_eps
  EXPECT_TRUE(layer.causal && layer.query_bias && layer.kv_bias && layer.out_bias);
  EXPECT_DOUBLE_EQ(*layer.scale, std::pow(0.05 * std::log(40.0) + 1, 2) / std::sqrt(14.0));
  EXPECT_EQ(layer.rope.layout, RopeLayout::kInterleaved);
  const Options lite =
      std::get<Options>(describe(family_case("deepseek_v2_lite").config).layers[0]);
  EXPECT_EQ(lite.query_rank, 0);
  EXPECT_TRUE(!lite.query_bias && lite.kv_bias && lite.out_bias);
}

TEST_F(LatentConfig, MissingFields) {
  const std::string size = ": got none, expected a whole number from 1 to ";
  for (const auto& [field, limit] :
       {std::pair("hidden_size", "16777216"), std::pair("num_attention_heads", "4096"),
        std::pair("num_hidden_layers", "4096"), std::pair("kv_lora_rank", "16777216"),
        std::pair("qk_nope_head_dim", "65536"), std::pair("qk_rope_head_dim", "65536"),
        std::pair("v_head_dim", "65536")}) {
    EXPECT_EQ(refusal(with("\"" + std::string(field) + "\"", "\"x\"")), field + size + limit);
  }
  EXPECT_EQ(refusal(with("\"q_lora_rank\"", "\"x\"")),
            "q_lora_rank: got none, expected a whole number, or null for none");
  EXPECT_EQ(refusal(with("\"factor\":40.0,", "")),
            "rope_parameters.factor: got none, expected a number");
}

TEST_F(LatentConfig, FieldsThatContradictEachOther) {
  EXPECT_EQ(refusal(with(R"("num_key_value_heads":3)", R"("num_key_value_heads":1)")),
            "num_key_value_heads: got 1, expected 3, as many as attention heads");
  EXPECT_EQ(refusal(with(R"("head_dim":8)", R"("head_dim":6)")),
            "head_dim: got 6, expected 8, as qk_rope_head_dim");
  EXPECT_EQ(refusal(with(R"("qk_head_dim":14)", R"("qk_head_dim":13)")),
            "qk_head_dim: got 13, expected 14, the sum of qk_nope_head_dim and qk_rope_head_dim");
}

TEST_F(LatentConfig, OptionsThatMakeNoLayer) {
  EXPECT_EQ(refusal(with(R"("qk_rope_head_dim":8)", R"("qk_rope_head_dim":7)", "deepseek_v2")),
            "LatentAttention: rope_dim: got 7, expected an even number, or 0 for no rope");
  EXPECT_EQ(refusal(with(R"("kv_lora_rank":10)", R"("kv_lora_rank":33)")),
            "LatentAttention: kv_rank: got 33, expected a latent smaller than the 33 elements of "
            "the keys and values that it stands for");
  EXPECT_EQ(refusal(with(R"("q_lora_rank":12)", R"("q_lora_rank":2000000)")),
            "LatentAttention: query_rank: got 2000000, expected 0 to 1048576");
  EXPECT_EQ(
      refusal(with(R"("rope_parameters":{)", R"("rope_parameters":{"full_attention":{)") + "}"),
      "rope_parameters: got one for each type of layer, expected one for all layers");
}

TEST_F(LatentConfig, WhatLadonDoesNotHonourIsNamed) {
  const auto unsupported = [&](const std::string& config) {
    return refusal(config, ErrorCode::kUnsupported);
  };
  EXPECT_EQ(
      unsupported(with(R"("topk_method":"greedy")", R"("rope_interleave":false)", "deepseek_v2")),
      "rope_interleave: got false, expected true in this family");
  for (const std::string field : {"index_n_heads", "index_head_dim", "index_topk"}) {
    EXPECT_EQ(unsupported(with(R"("moe_layer_freq":1)", "\"" + field + "\":64")),
              field +
                  ": got 64, expected it to be off: Ladon does not honour it (name it in "
                  "ignored_fields if it makes no difference)");
  }
  for (const std::string field : {"qk_layernorm", "sliding_window", "layer_types", "kv_norm"}) {
    EXPECT_EQ(unsupported(with(R"("moe_layer_freq":1)", "\"" + field + "\":7")),
              "\"" + field +
                  "\": got 7, expected only fields that Ladon knows where they may concern "
                  "attention (name it in ignored_fields if it does not)");
  }
  // Where one of them is missing, published codes disagree.
  EXPECT_EQ(unsupported(with(R"(,"mscale_all_dim":0.707)", "", "deepseek_v2")),
            "rope_scaling: got mscale 0.707 and mscale_all_dim 0, expected both of them or "
            "neither");
  EXPECT_EQ(unsupported(with(R"("mscale":1.0,)", "")),
            "rope_parameters: got mscale 0 and mscale_all_dim 0.5, expected both of them or "
            "neither");
  EXPECT_NO_THROW(describe(with(R"(,"mscale_all_dim":0.5)", "")));
  EXPECT_NO_THROW(describe(with(R"("mscale":1.0,"mscale_all_dim":0.5,)", "")));
}

TEST_F(LatentConfig, ConvertedModels) {
  const auto changed = [&](const std::string& before, const std::string& after) {
    return refusal(with(before, after, "ladon_latent"));
  };
  const ModelDescription model = describe(family_case("ladon_latent").config);
  EXPECT_EQ(std::get<Options>(model.layers[1]).rope_dim, 6);
  EXPECT_EQ(changed(R"("ladon_latent":{)", R"("other":{)"),
            "ladon_latent: got none, expected an object");
  EXPECT_EQ(changed(R"("kv_ranks":[10,7])", R"("kv_ranks":[10])"),
            "ladon_latent.kv_ranks: got 1 items, expected one for each of 2 layers");
  EXPECT_EQ(changed(R"("kv_ranks":[10,7])", R"("kv_ranks":7)"),
            "ladon_latent.kv_ranks: got 7, expected an item for each layer");
  EXPECT_EQ(changed(R"("nope_dims":[6,3])", R"("nope_dims":[6,0])"),
            "ladon_latent.nope_dims: got 0, expected whole numbers from 1 to 65536");
  EXPECT_EQ(changed(R"("scales":[0.3,0.5])", R"("scales":[0.3,"x"])"),
            "ladon_latent.scales: got the text \"x\", expected numbers");
  EXPECT_EQ(changed(R"([1.5,0.25,0.75])", "3"),
            "ladon_latent.frequencies: got 3, expected a list for each layer");
  EXPECT_EQ(changed(R"("magnitudes":[1.5,1.25])", R"("magnitudes":[1.5,-1])"),
            "LatentAttention: rope.magnitude: got -1, expected a positive finite number");
  EXPECT_NE(error_of([&] { describe(with(R"("causal")", R"("cousal")", "ladon_latent")); },
                     ErrorCode::kUnsupported)
                .find("ladon_latent.cousal"),
            std::string::npos);
}

}  // namespace
}  // namespace ladon::test
