// Folders of DeepSeek-V2, V2-Lite and V3.
#include <cmath>
#include <utility>

#include "models/family_case_parts.h"
#include "models/plain_latent.h"

namespace ladon::test {
namespace {

/// The sizes of all cases but for the query's rank; no two are alike.
constexpr int kEmbed = 20;
constexpr int kHeads = 3;
constexpr int kKvRank = 10;
constexpr int kNope = 6;
constexpr int kRope = 8;
constexpr int kValue = 5;

/// All fields that a sound config has; `more` ends it.
std::string config_of(const std::string& family, const std::string& query_rank,
                      const std::string& more) {
  return R"({"model_type":")" + family + R"(","hidden_size":20,"num_attention_heads":3,
    "num_key_value_heads":3,"num_hidden_layers":2,"kv_lora_rank":10,"qk_nope_head_dim":6,
    "qk_rope_head_dim":8,"v_head_dim":5,"q_lora_rank":)" +
         query_rank + R"(,"rms_norm_eps":0.05,"n_routed_experts":4,"routed_scaling_factor":2.5,
    "moe_layer_freq":1,"first_k_dense_replace":1,"auto_map":{"AutoModel":"modeling_deepseek.M"},)" +
         more;
}

FamilyCase latent_case(const std::string& name, const std::string& family, int query_rank,
                       bool bias, const std::string& more,
                       const std::function<void(PlainLatent&)>& finish,
                       const std::string& outer = "model.") {
  FamilyCase setup;
  setup.name = name;
  setup.family = family;
  setup.latent = true;
  setup.config = config_of(family, query_rank == 0 ? "null" : std::to_string(query_rank), more);
  setup.num_layers = 2;
  setup.embed_dim = kEmbed;
  setup.prefix_in_file = outer + "layers.%.self_attn.";
  setup.prefix_saved = "model.layers.%.self_attn.";
  TensorMaker maker(11);
  const int query_width = kHeads * (kNope + kRope);
  for (int layer = 0; layer < setup.num_layers; ++layer) {
    const std::string prefix = layer_prefix(setup.prefix_in_file, layer);
    const auto add = [&](const std::string& proj, int out, int in, bool with_bias) {
      add_linear(setup.tensors, maker, prefix + proj, {out, in}, in, with_bias ? out : 0);
    };
    if (query_rank == 0) {
      add("q_proj", query_width, kEmbed, false);
    } else {
      add("q_a_proj", query_rank, kEmbed, bias);
      setup.tensors.emplace(prefix + "q_a_layernorm.weight", maker.make({query_rank}, 0.5, 1));
      add("q_b_proj", query_width, query_rank, false);
    }
    add("kv_a_proj_with_mqa", kKvRank + kRope, kEmbed, bias);
    setup.tensors.emplace(prefix + "kv_a_layernorm.weight", maker.make({kKvRank}, 0.5, 1));
    add("kv_b_proj", kHeads * (kNope + kValue), kKvRank, false);
    add("o_proj", kEmbed, kHeads * kValue, bias);
  }
  setup.plain = [=, prefix_in_file = setup.prefix_in_file](const TensorMap& tensors, int layer) {
    const std::string prefix = layer_prefix(prefix_in_file, layer);
    PlainLatent plain;
    plain.num_heads = kHeads;
    plain.query_rank = query_rank;
    plain.kv_rank = kKvRank;
    plain.nope = kNope;
    plain.rope = kRope;
    plain.value = kValue;
    plain.embed = kEmbed;
    if (query_rank == 0) {
      plain.query_up = linear_of(tensors, prefix + "q_proj");
    } else {
      plain.query_down = linear_of(tensors, prefix + "q_a_proj");
      plain.query_norm = numbers_of(*tensor_at(tensors, prefix + "q_a_layernorm.weight"));
      plain.query_up = linear_of(tensors, prefix + "q_b_proj");
    }
    plain.latent = linear_of(tensors, prefix + "kv_a_proj_with_mqa");
    plain.latent_norm = numbers_of(*tensor_at(tensors, prefix + "kv_a_layernorm.weight"));
    plain.expanded = linear_of(tensors, prefix + "kv_b_proj");
    plain.out = linear_of(tensors, prefix + "o_proj");
    plain.scale = 1 / std::sqrt(kNope + kRope);
    finish(plain);
    return PlainRun([plain](const Rows& x) { return plain.run(x); });
  };
  return setup;
}

double mscale(double factor, double weight) { return 0.1 * weight * std::log(factor) + 1; }

}  // namespace

std::vector<FamilyCase> deepseek_cases() {
  const auto yarn = [](double factor, double over, double under) {
    return [=](PlainLatent& plain) {
      plain.frequencies =
          yarn_frequencies(kRope, 100, {.factor = factor, .context = 32, .fast = 4, .slow = 1});
      plain.rope_magnitude = mscale(factor, over) / mscale(factor, under);
      plain.scale *= std::pow(mscale(factor, under), 2);
    };
  };
  const std::string both = R"("max_position_embeddings":1280,"rope_theta":100,"rope_scaling":{
    "beta_fast":4,"beta_slow":1,"factor":40,"mscale":0.707,"mscale_all_dim":0.707,
    "original_max_position_embeddings":32,"type":"yarn"}})";
  std::vector<FamilyCase> cases;
  cases.push_back(latent_case("deepseek_v2", "deepseek_v2", 12, false,
                              R"("attention_bias":false,"topk_method":"greedy",)" + both,
                              yarn(40, 0.707, 0.707)));
  // V2-Lite: direct queries, which have no bias even where the others have.
  cases.push_back(latent_case("deepseek_v2_lite", "deepseek_v2", 0, true,
                              R"("attention_bias":true,)" + both, yarn(40, 0.707, 0.707)));
  cases.push_back(latent_case("deepseek_v3", "deepseek_v3", 12, true,
                              R"("attention_bias":true,"rope_interleave":true,"head_dim":8,
      "qk_head_dim":14,"num_nextn_predict_layers":1,"scoring_func":"sigmoid",
      "quantization_config":null,"rope_parameters":{"rope_type":"yarn","rope_theta":100,
      "beta_fast":4.0,"beta_slow":1.0,"factor":40.0,"mscale":1.0,"mscale_all_dim":0.5,
      "original_max_position_embeddings":32}})",
                              yarn(40, 1, 0.5)));
  cases.push_back(latent_case(
      "deepseek_v3_half_split", "deepseek_v3", 12, false, R"("rope_interleave":false})",
      [](PlainLatent& plain) {
        plain.frequencies = plain_frequencies(kRope, 10000);
        plain.interleaved = false;
      },
      /*outer=*/""));
  return cases;
}

}  // namespace ladon::test
