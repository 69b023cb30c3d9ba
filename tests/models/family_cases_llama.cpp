// Folders of the families with q_proj, k_proj and v_proj.
#include <cmath>
#include <utility>

#include "models/family_case_parts.h"

namespace ladon::test {

FamilyCase llama_like(const std::string& name, const std::string& family, const std::string& config,
                      int num_layers, const std::string& outer) {
  FamilyCase setup;
  setup.name = name;
  setup.family = family;
  setup.config = config;
  setup.num_layers = num_layers;
  setup.prefix_in_file = outer + "layers.%.self_attn.";
  setup.prefix_saved = "model.layers.%.self_attn.";
  return setup;
}

std::vector<FamilyCase> llama_cases() {
  std::vector<FamilyCase> cases;
  {
    // As the first Llama was published: no KV heads, no theta; buffers among the tensors.
    const Sizes sizes{24, 4, 4, 6};
    FamilyCase setup = llama_like("llama1", "llama", R"({"model_type":"llama",
      "architectures":["LLaMAForCausalLM"],"hidden_size":24,"num_attention_heads":4,
      "num_hidden_layers":2,"hidden_act":"silu","rms_norm_eps":1e-06,"vocab_size":32000,
      "torch_dtype":"float16","use_cache":true,"tie_word_embeddings":false,"max_sequence_length":2048,
      "intermediate_size":64,"initializer_range":0.02,"pad_token_id":-1})");
    setup.other_tensors = {"rotary_emb.inv_freq"};
    cases.push_back(separate_case(
        std::move(setup), sizes, false, false,
        [](PlainAttention& plain, int) { plain.frequencies = plain_frequencies(6, 10000); }));
    for (int layer = 0; layer < 2; ++layer) {
      cases.back().tensors.emplace(
          "model.layers." + std::to_string(layer) + ".self_attn.rotary_emb.inv_freq",
          TensorMaker(1).make({3}, 1));
    }
  }
  cases.push_back(separate_case(
      llama_like("llama3", "llama", R"({"model_type":"llama","architectures":["LlamaForCausalLM"],
        "attention_bias":true,"attention_dropout":0.0,"mlp_bias":false,"hidden_size":20,
        "num_attention_heads":6,"num_key_value_heads":2,"num_hidden_layers":2,"head_dim":8,
        "max_position_embeddings":64,"pretraining_tp":1,"rope_theta":500.0,
        "rope_scaling":{"factor":4.0,"low_freq_factor":1.0,"high_freq_factor":3.0,
        "original_max_position_embeddings":24,"rope_type":"llama3"},"torch_dtype":"bfloat16"})",
                 2, /*outer=*/""),
      {20, 6, 2, 8}, true, true, [](PlainAttention& plain, int) {
        plain.frequencies =
            llama3_frequencies(8, 500, {.factor = 4, .low = 1, .high = 3, .context = 24});
      }));
  cases.push_back(separate_case(
      llama_like("llama_linear", "llama", R"({"model_type":"llama","hidden_size":24,
        "num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,"dtype":"float32",
        "rope_parameters":{"rope_type":"linear","factor":3,"rope_theta":1000}})"),
      {24, 4, 2, 6}, false, false,
      [](PlainAttention& plain, int) { plain.frequencies = linear_frequencies(6, 1000, 3); }));
  cases.push_back(separate_case(
      llama_like("llama_yarn", "llama", R"({"model_type":"llama","hidden_size":24,
        "num_attention_heads":2,"num_key_value_heads":1,"num_hidden_layers":1,
        "max_position_embeddings":256,"rope_theta":100,
        "rope_scaling":{"type":"yarn","factor":8.0,"original_max_position_embeddings":32,
        "beta_fast":4,"beta_slow":1}})",
                 1),
      {24, 2, 1, 12}, false, false, [](PlainAttention& plain, int) {
        plain.frequencies =
            yarn_frequencies(12, 100, {.factor = 8, .context = 32, .fast = 4, .slow = 1});
        plain.rope_magnitude = 0.1 * std::log(8.0) + 1;
      }));
  const Finish rope_of_8 = [](PlainAttention& plain, int) {
    plain.frequencies = plain_frequencies(8, 10000);
  };
  const std::string mistral = R"({"model_type":"mistral","hidden_size":20,"head_dim":8,
    "num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":2,"rope_theta":10000.0,
    "sliding_window":)";
  cases.push_back(separate_case(llama_like("mistral", "mistral", mistral + "4}"), {20, 4, 2, 8},
                                false, false, [=](PlainAttention& plain, int layer) {
                                  rope_of_8(plain, layer);
                                  plain.window = 4;
                                }));
  cases.push_back(separate_case(llama_like("mistral_full", "mistral", mistral + "null}"),
                                {20, 4, 2, 8}, false, false, rope_of_8));
  return cases;
}

std::vector<FamilyCase> qwen_and_gemma_cases() {
  std::vector<FamilyCase> cases;
  const Finish qwen2 = [](PlainAttention& plain, int layer) {
    plain.frequencies = plain_frequencies(6, 1000000);
    if (layer >= 1) plain.window = 3;
  };
  const std::string qwen = R"("hidden_size":24,"num_attention_heads":4,"num_key_value_heads":2,
    "num_hidden_layers":3,"rope_theta":1000000.0,"sliding_window":3,"use_mrope":false,)";
  cases.push_back(separate_case(llama_like("qwen2", "qwen2",
                                           R"({"model_type":"qwen2","use_sliding_window":true,)" +
                                               qwen + R"("max_window_layers":1})",
                                           3),
                                {24, 4, 2, 6}, true, false, qwen2));
  cases.push_back(
      separate_case(llama_like("qwen2_types", "qwen2",
                               R"({"model_type":"qwen2","use_sliding_window":true,)" + qwen +
                                   R"("layer_types":["full_attention",
                                             "sliding_attention","sliding_attention"]})",
                               3),
                    {24, 4, 2, 6}, true, false, qwen2));
  cases.push_back(separate_case(llama_like("qwen2_full", "qwen2",
                                           R"({"model_type":"qwen2","use_sliding_window":false,)" +
                                               qwen + R"("max_window_layers":0})",
                                           3),
                                {24, 4, 2, 6}, true, false, [](PlainAttention& plain, int) {
                                  plain.frequencies = plain_frequencies(6, 1000000);
                                }));
  cases.push_back(separate_case(
      llama_like("qwen3", "qwen3", R"({"model_type":"qwen3","attention_bias":false,"head_dim":10,
        "hidden_size":24,"num_attention_heads":6,"num_key_value_heads":3,"num_hidden_layers":2,
        "rms_norm_eps":0.01,"rope_scaling":null,"rope_theta":1000000,"sliding_window":null,
        "use_sliding_window":false,"max_window_layers":2})"),
      {24, 6, 3, 10}, false, false, [](PlainAttention& plain, int) {
        plain.frequencies = plain_frequencies(10, 1000000);
        plain.norm_epsilon = 0.01;
      }));
  TensorMaker maker(9);
  for (int layer = 0; layer < 2; ++layer) {
    for (const char* name : {"q_norm.weight", "k_norm.weight"}) {
      cases.back().tensors.emplace("model.layers." + std::to_string(layer) + ".self_attn." + name,
                                   maker.make({10}, 0.5, 1));
    }
  }
  cases.push_back(
      separate_case(llama_like("gemma2", "gemma2", R"({"model_type":"gemma2","attention_bias":false,
        "attn_logit_softcapping":2.0,"final_logit_softcapping":30.0,"head_dim":8,"hidden_size":20,
        "num_attention_heads":4,"num_key_value_heads":2,"num_hidden_layers":3,
        "query_pre_attn_scalar":5,"rope_theta":10000.0,"sliding_window":4,"sliding_window_size":4,
        "cache_implementation":"hybrid","hidden_activation":"gelu_pytorch_tanh"})",
                               3),
                    {20, 4, 2, 8}, false, false, [](PlainAttention& plain, int layer) {
                      plain.frequencies = plain_frequencies(8, 10000);
                      plain.scale = 1 / std::sqrt(5.0);
                      plain.softcap = 2;
                      if (layer % 2 == 0) plain.window = 4;
                    }));
  cases.push_back(separate_case(
      llama_like("gpt_oss", "gpt_oss", R"({"model_type":"gpt_oss","attention_bias":true,
        "head_dim":12,"hidden_size":20,"num_attention_heads":4,"num_key_value_heads":2,
        "num_hidden_layers":3,"layer_types":["full_attention","sliding_attention",
        "full_attention"],"sliding_window":5,"rope_theta":150.0,"num_local_experts":4,
        "rope_scaling":{"beta_fast":4.0,"beta_slow":1.0,"factor":16.0,
        "original_max_position_embeddings":40,"rope_type":"yarn","truncate":false},
        "max_position_embeddings":640,"initial_context_length":40,"swiglu_limit":7.0,
        "quantization_config":{"quant_method":"mxfp4","modules_to_not_convert":["x"]}})",
                 3),
      {20, 4, 2, 12}, true, true, [](PlainAttention& plain, int layer) {
        plain.frequencies = yarn_frequencies(
            12, 150, {.factor = 16, .context = 40, .truncate = false, .fast = 4, .slow = 1});
        plain.rope_magnitude = 0.1 * std::log(16.0) + 1;
        if (layer == 1) plain.window = 5;
      }));
  for (int layer = 0; layer < 3; ++layer) {
    cases.back().tensors.emplace("model.layers." + std::to_string(layer) + ".self_attn.sinks",
                                 maker.make({4}, 1, 0.5));
  }
  return cases;
}

}  // namespace ladon::test
