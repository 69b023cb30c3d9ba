// Folders of Cohere, Gemma 3, GPT-NeoX, Mixtral, OLMo 2, Phi-3 and Qwen3-MoE, and of rope scaling
// by the length of the sequence.
#include <cmath>
#include <utility>

#include "models/family_case_parts.h"

namespace ladon::test {
namespace {

/// Adds q_norm.weight and k_norm.weight to every layer.
void add_norms(FamilyCase& setup, const Dims& query_shape, const Dims& key_shape, double middle) {
  TensorMaker maker(12);
  for (int layer = 0; layer < setup.num_layers; ++layer) {
    const std::string prefix = layer_prefix(setup.prefix_in_file, layer);
    setup.tensors.emplace(prefix + "q_norm.weight", maker.make(query_shape, 0.5, middle));
    setup.tensors.emplace(prefix + "k_norm.weight", maker.make(key_shape, 0.5, middle));
  }
}

FamilyCase moe_case(const std::string& name, const std::string& window, const Finish& finish) {
  FamilyCase setup = separate_case(llama_like(name, "qwen3_moe",
                                              R"({"model_type":"qwen3_moe","attention_bias":false,
        "head_dim":10,"hidden_size":24,"num_attention_heads":6,"num_key_value_heads":3,
        "num_hidden_layers":2,"rms_norm_eps":0.01,"rope_scaling":null,"rope_theta":1000000.0,
        "num_experts":4,"num_experts_per_tok":2,"norm_topk_prob":true,"decoder_sparse_step":1,
        "mlp_only_layers":[],"moe_intermediate_size":16,"router_aux_loss_coef":0.001,
        "max_window_layers":2,)" + window + "}"),
                                   {24, 6, 3, 10}, false, false, finish);
  add_norms(setup, {10}, {10}, 1);
  return setup;
}

FamilyCase gemma3_case(const std::string& name, const std::string& rope, double factor,
                       const std::string& types, int window_every) {
  FamilyCase setup =
      separate_case(llama_like(name, "gemma3_text",
                               R"({"model_type":"gemma3_text","attention_bias":false,
        "attn_logit_softcapping":null,"final_logit_softcapping":null,"head_dim":8,"hidden_size":20,
        "num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":3,"rms_norm_eps":0.02,
        "query_pre_attn_scalar":5,"sliding_window":4,)" +
                                   types + rope + "}",
                               3),
                    {20, 4, 2, 8}, false, false, [=](PlainAttention& plain, int layer) {
                      const bool windowed = (layer + 1) % window_every != 0;
                      if (windowed) plain.window = 4;
                      plain.frequencies = windowed ? plain_frequencies(8, 500)
                                                   : linear_frequencies(8, 9000, factor);
                      plain.scale = 1 / std::sqrt(5.0);
                      plain.norm_epsilon = 0.02;
                      for (double& weight : plain.query_norm) weight += 1;
                      for (double& weight : plain.key_norm) weight += 1;
                    });
  add_norms(setup, {8}, {8}, 0);
  return setup;
}

const std::vector<double> kShort = {1.0, 1.2, 1.7};
const std::vector<double> kLong = {1.5, 3.0, 6.5};

/// 6 of 8 elements are rotated. Trained on 8 tokens, made for 64.
FamilyCase phi3_case(const std::string& name, const std::string& kind, int context) {
  const Sizes sizes{32, 4, 2, 8};
  FamilyCase setup;
  setup.name = name;
  setup.family = "phi3";
  setup.prefix_in_file = setup.prefix_saved = "model.layers.%.self_attn.";
  setup.rope_context = context;
  setup.config = R"({"model_type":"phi3","hidden_size":32,"num_attention_heads":4,
    "num_key_value_heads":2,"num_hidden_layers":2,"attention_bias":false,"attention_dropout":0.0,
    "embd_pdrop":0.0,"resid_pdrop":0.0,"max_position_embeddings":64,"sliding_window":9,
    "original_max_position_embeddings":)" +
                 std::to_string(context > 8 ? 8 : 12) +
                 R"(,"partial_rotary_factor":0.75,"rope_theta":10000.0,
    "auto_map":{"AutoConfig":"configuration_phi3.Phi3Config"},"rope_scaling":{"type":")" +
                 kind + R"(","short_factor":[1.0,1.2,1.7],"long_factor":[1.5,3,6.5]}})";
  const FusedRows rows{.query = [](int head, int place) { return head * 8 + place; },
                       .key = [](int head, int place) { return 32 + head * 8 + place; },
                       .value = [](int head, int place) { return 48 + head * 8 + place; }};
  return fused_case(
      std::move(setup), sizes, "qkv_proj", "o_proj", rows, false, [=](PlainAttention& plain, int) {
        const double original = context > 8 ? 8 : 12;
        plain.window = 9;
        plain.frequencies = divided_frequencies(6, 10000, context > 8 ? kLong : kShort);
        plain.rope_magnitude = std::sqrt(1 + std::log(64 / original) / std::log(original));
      });
}

FamilyCase neox_case(const std::string& name, const std::string& rest, bool bias, int rotated,
                     double theta, const std::string& outer) {
  const Sizes sizes{32, 2, 2, 16};
  FamilyCase setup;
  setup.name = name;
  setup.family = "gpt_neox";
  setup.prefix_in_file = outer + "layers.%.attention.";
  setup.prefix_saved = "gpt_neox.layers.%.attention.";
  setup.config = R"({"model_type":"gpt_neox","hidden_size":32,"num_attention_heads":2,
    "num_hidden_layers":2,"hidden_act":"gelu","intermediate_size":64,"use_parallel_residual":true,
    "max_position_embeddings":128,)" +
                 rest + "}";
  setup = fused_case(
      std::move(setup), sizes, "query_key_value", "dense", per_head_rows(sizes), bias,
      [=](PlainAttention& plain, int) { plain.frequencies = plain_frequencies(rotated, theta); });
  // The causal mask and the rope's frequencies, kept as tensors.
  setup.other_tensors = {"bias", "masked_bias", "rotary_emb.inv_freq"};
  for (int layer = 0; layer < setup.num_layers; ++layer) {
    for (const std::string& other : setup.other_tensors) {
      setup.tensors.emplace(layer_prefix(setup.prefix_in_file, layer) + other,
                            TensorMaker(1).make({3}, 1));
    }
  }
  return setup;
}

FamilyCase dynamic_case(const std::string& name, int trained_on, int context) {
  const std::string config = R"({"model_type":"llama","hidden_size":24,"num_attention_heads":4,
    "num_key_value_heads":2,"num_hidden_layers":2,"rope_theta":100.0,"rope_scaling":
    {"type":"dynamic","factor":3.0},"max_position_embeddings":)" +
                             std::to_string(trained_on) + "}";
  FamilyCase setup = llama_like(name, "llama", config);
  setup.rope_context = context;
  return separate_case(
      std::move(setup), {24, 4, 2, 6}, false, false, [=](PlainAttention& plain, int) {
        plain.frequencies = context > trained_on
                                ? dynamic_frequencies(6, 100, 3, trained_on, context)
                                : plain_frequencies(6, 100);
      });
}

}  // namespace

std::vector<FamilyCase> newer_cases() {
  std::vector<FamilyCase> cases;
  cases.push_back(
      separate_case(llama_like("mixtral", "mixtral", R"({"model_type":"mixtral","hidden_size":24,
        "num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,"sliding_window":5,
        "rope_theta":1000000.0,"num_local_experts":4,"num_experts_per_tok":2,
        "router_aux_loss_coef":0.02,"attention_dropout":0.0,"output_router_logits":false})"),
                    {24, 4, 2, 6}, false, false, [](PlainAttention& plain, int) {
                      plain.frequencies = plain_frequencies(6, 1000000);
                      plain.window = 5;
                    }));
  cases.push_back(moe_case("qwen3_moe", R"("sliding_window":null,"use_sliding_window":false)",
                           [](PlainAttention& plain, int) {
                             plain.frequencies = plain_frequencies(10, 1000000);
                             plain.norm_epsilon = 0.01;
                           }));
  cases.push_back(moe_case("qwen3_moe_window", R"("sliding_window":3,"use_sliding_window":true)",
                           [](PlainAttention& plain, int) {
                             plain.frequencies = plain_frequencies(10, 1000000);
                             plain.norm_epsilon = 0.01;
                             plain.window = 3;
                           }));
  cases.push_back(separate_case(
      llama_like("olmo2", "olmo2", R"({"model_type":"olmo2","attention_bias":false,"hidden_size":24,
        "num_attention_heads":6,"num_key_value_heads":2,"num_hidden_layers":2,"rms_norm_eps":0.03,
        "rope_scaling":null,"rope_theta":500,"attention_dropout":0.0})"),
      {24, 6, 2, 4}, false, false, [](PlainAttention& plain, int) {
        plain.frequencies = plain_frequencies(4, 500);
        plain.norm_epsilon = 0.03;
      }));
  add_norms(cases.back(), {24}, {8}, 1);
  cases.push_back(
      separate_case(llama_like("cohere", "cohere", R"({"model_type":"cohere","attention_bias":true,
        "hidden_size":24,"num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,
        "logit_scale":0.0625,"layer_norm_eps":1e-05,"rope_theta":8000.0,"use_qk_norm":false})"),
                    {24, 4, 2, 6}, true, true, [](PlainAttention& plain, int) {
                      plain.frequencies = plain_frequencies(6, 8000);
                      plain.interleaved = true;
                    }));
  cases.push_back(separate_case(
      llama_like("cohere_norm", "cohere", R"({"model_type":"cohere","attention_bias":false,
        "hidden_size":24,"num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,
        "layer_norm_eps":0.02,"rope_theta":8000.0,"use_qk_norm":true})"),
      {24, 4, 2, 6}, false, false, [](PlainAttention& plain, int) {
        plain.frequencies = plain_frequencies(6, 8000);
        plain.interleaved = true;
        plain.norm_epsilon = 0.02;
        plain.layer_norm_of_each_head = true;
      }));
  add_norms(cases.back(), {4, 6}, {2, 6}, 1);
  cases.push_back(phi3_case("phi3_short", "su", 0));
  cases.push_back(phi3_case("phi3_long", "longrope", 11));
  // Old style: every sixth layer sees all, here every second by its own pattern.
  cases.push_back(gemma3_case("gemma3", R"("rope_theta":9000.0,"rope_local_base_freq":500.0,
    "rope_scaling":{"factor":8.0,"rope_type":"linear"})",
                              8, R"("sliding_window_pattern":2,)", 2));
  cases.push_back(gemma3_case(
      "gemma3_types", R"("rope_parameters":{
    "full_attention":{"rope_type":"linear","factor":2.0,"rope_theta":9000.0},
    "sliding_attention":{"rope_type":"default","rope_theta":500.0}})",
      2, R"("layer_types":["sliding_attention","sliding_attention","full_attention"],)", 3));
  cases.push_back(neox_case("gpt_neox", R"("rotary_pct":0.25,"rotary_emb_base":1000)", true, 4,
                            1000, "gpt_neox."));
  cases.push_back(neox_case("gpt_neox_new", R"("attention_bias":false,"rope_parameters":{
    "rope_type":"default","rope_theta":300.0,"partial_rotary_factor":0.5})",
                            false, 8, 300, ""));
  cases.push_back(dynamic_case("llama_dynamic_short", 16, 0));
  cases.push_back(dynamic_case("llama_dynamic", 7, 11));
  return cases;
}

}  // namespace ladon::test
