// The attention fields of configs as they were published, and what they come to: nothing in them
// may be refused or misread. Fields that have no bearing on attention are kept where a name is
// misleading.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "io/io_support.h"
#include "ladon/alibi.h"
#include "ladon/checkpoint.h"

namespace ladon::test {
namespace {

class PublishedConfigs : public testing::Test {
 protected:
  const ModelDescription& describe(const std::string& config) {
    write_bytes(temp_ / "config.json", config);
    model_ = describe_model(temp_.path());
    return model_;
  }
  const MultiHeadAttentionOptions& layer(std::size_t index) const {
    return std::get<MultiHeadAttentionOptions>(model_.layers.at(index));
  }
  /// "layers embed heads kv head_dim".
  std::string sizes() const {
    return std::to_string(model_.num_layers) + " " + std::to_string(model_.embed_dim) + " " +
           std::to_string(model_.num_heads) + " " + std::to_string(model_.num_kv_heads) + " " +
           std::to_string(model_.head_dim);
  }

  TempFolder temp_;
  ModelDescription model_;
};

TEST_F(PublishedConfigs, Llama) {
  describe(R"({"architectures":["LlamaForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
    "bos_token_id":128000,"eos_token_id":128001,"hidden_act":"silu","hidden_size":4096,
    "initializer_range":0.02,"intermediate_size":14336,"max_position_embeddings":131072,
    "mlp_bias":false,"model_type":"llama","num_attention_heads":32,"num_hidden_layers":32,
    "num_key_value_heads":8,"pretraining_tp":1,"rms_norm_eps":1e-05,"rope_scaling":{"factor":8.0,
    "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":8192,
    "rope_type":"llama3"},"rope_theta":500000.0,"tie_word_embeddings":false,
    "torch_dtype":"bfloat16","transformers_version":"4.43.0.dev0","use_cache":true,
    "vocab_size":128256})");
  EXPECT_EQ(sizes(), "32 4096 32 8 128");
  EXPECT_EQ(layer(31).rope->base, 500000);
  EXPECT_EQ(layer(31).rope->scaling.kind, RopeScaling::kLlama3);
  EXPECT_EQ(layer(31).rope->scaling.original_context, 8192);
  EXPECT_FALSE(layer(0).query_bias);
}

TEST_F(PublishedConfigs, Mistral) {
  describe(R"({"architectures":["MistralForCausalLM"],"bos_token_id":1,"eos_token_id":2,
    "hidden_act":"silu","hidden_size":4096,"initializer_range":0.02,"intermediate_size":14336,
    "max_position_embeddings":32768,"model_type":"mistral","num_attention_heads":32,
    "num_hidden_layers":32,"num_key_value_heads":8,"rms_norm_eps":1e-05,"rope_theta":10000.0,
    "sliding_window":4096,"tie_word_embeddings":false,"torch_dtype":"bfloat16",
    "transformers_version":"4.34.0.dev0","use_cache":true,"vocab_size":32000})");
  EXPECT_EQ(sizes(), "32 4096 32 8 128");
  EXPECT_EQ(layer(7).window_left, 4095);
}

TEST_F(PublishedConfigs, Qwen) {
  describe(R"({"architectures":["Qwen2ForCausalLM"],"attention_dropout":0.0,"hidden_size":3584,
    "intermediate_size":18944,"max_position_embeddings":32768,"max_window_layers":28,
    "model_type":"qwen2","num_attention_heads":28,"num_hidden_layers":28,"num_key_value_heads":4,
    "rms_norm_eps":1e-06,"rope_theta":1000000.0,"sliding_window":131072,
    "tie_word_embeddings":false,"torch_dtype":"bfloat16","use_sliding_window":false})");
  EXPECT_EQ(sizes(), "28 3584 28 4 128");
  EXPECT_TRUE(layer(27).query_bias && layer(27).key_bias && layer(27).value_bias);
  EXPECT_FALSE(layer(27).out_bias);
  EXPECT_FALSE(layer(27).window_left.has_value());

  describe(R"({"architectures":["Qwen3ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"head_dim":128,"hidden_act":"silu","hidden_size":1024,
    "max_position_embeddings":40960,"max_window_layers":28,"model_type":"qwen3",
    "num_attention_heads":16,"num_hidden_layers":28,"num_key_value_heads":8,"rms_norm_eps":1e-06,
    "rope_scaling":null,"rope_theta":1000000,"sliding_window":null,"torch_dtype":"bfloat16",
    "use_sliding_window":false,"vocab_size":151936})");
  EXPECT_EQ(sizes(), "28 1024 16 8 128");
  EXPECT_TRUE(layer(0).qk_norm);
  EXPECT_EQ(layer(0).qk_norm_epsilon, 1e-6);
  const double base = layer(0).rope->base;

  // The same model, written by newer code.
  std::string types;
  for (int i = 0; i < 28; ++i) types += i == 0 ? "\"full_attention\"" : ",\"full_attention\"";
  describe(R"({"architectures":["Qwen3ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"dtype":"bfloat16","head_dim":128,"hidden_size":1024,
    "layer_types":[)" +
           types + R"(],"max_position_embeddings":40960,"max_window_layers":28,
    "model_type":"qwen3","num_attention_heads":16,"num_hidden_layers":28,"num_key_value_heads":8,
    "pad_token_id":null,"rms_norm_eps":1e-06,"rope_parameters":{"rope_theta":1000000,
    "rope_type":"default"},"sliding_window":null,"use_sliding_window":false})");
  EXPECT_EQ(sizes(), "28 1024 16 8 128");
  EXPECT_EQ(layer(27).rope->base, base);
  EXPECT_EQ(model_.dtype, DType::kBF16);
}

TEST_F(PublishedConfigs, DeepSeek) {
  const auto latent = [&](std::size_t index) -> const LatentAttentionOptions& {
    return std::get<LatentAttentionOptions>(model_.layers.at(index));
  };
  /// "query rank, kv rank, nope, rope, value".
  const auto ranks = [&] {
    const LatentAttentionOptions& o = latent(model_.layers.size() - 1);
    return std::to_string(o.query_rank) + " " + std::to_string(o.kv_rank) + " " +
           std::to_string(o.nope_dim) + " " + std::to_string(o.rope_dim) + " " +
           std::to_string(o.value_dim);
  };
  // The softmax's scale as the models' code has it: 192^-0.5 * mscale^2.
  const auto scale = [](double mscale) {
    return std::pow(0.1 * mscale * std::log(40.0) + 1, 2) / std::sqrt(192.0);
  };
  const std::string yarn_of_v2 = R"("rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,
    "mscale":0.707,"mscale_all_dim":0.707,"original_max_position_embeddings":4096,"type":"yarn"},)";
  describe(R"({"architectures":["DeepseekV2ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"auto_map":{"AutoConfig":"configuration_deepseek.DeepseekV2Config",
    "AutoModel":"modeling_deepseek.DeepseekV2Model"},"aux_loss_alpha":0.001,"ep_size":1,
    "first_k_dense_replace":1,"hidden_act":"silu","hidden_size":5120,"intermediate_size":12288,
    "kv_lora_rank":512,"max_position_embeddings":163840,"model_type":"deepseek_v2",
    "moe_intermediate_size":1536,"moe_layer_freq":1,"n_group":8,"n_routed_experts":160,
    "n_shared_experts":2,"norm_topk_prob":false,"num_attention_heads":128,"num_experts_per_tok":6,
    "num_hidden_layers":60,"num_key_value_heads":128,"pretraining_tp":1,"q_lora_rank":1536,
    "qk_nope_head_dim":128,"qk_rope_head_dim":64,"rms_norm_eps":1e-06,)" +
           yarn_of_v2 + R"("rope_theta":10000,"routed_scaling_factor":16.0,
    "scoring_func":"softmax","seq_aux":true,"tie_word_embeddings":false,"topk_group":3,
    "topk_method":"group_limited_greedy","torch_dtype":"bfloat16","use_cache":true,
    "v_head_dim":128,"vocab_size":102400})");
  EXPECT_EQ(sizes(), "60 5120 128 128 192");
  EXPECT_EQ(ranks(), "1536 512 128 64 128");
  EXPECT_DOUBLE_EQ(*latent(0).scale, scale(0.707));
  EXPECT_EQ(model_.dtype, DType::kBF16);

  describe(R"({"architectures":["DeepseekV2ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"auto_map":{"AutoConfig":"configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha":0.001,"first_k_dense_replace":1,"hidden_size":2048,"intermediate_size":10944,
    "kv_lora_rank":512,"max_position_embeddings":163840,"model_type":"deepseek_v2",
    "moe_intermediate_size":1408,"moe_layer_freq":1,"n_group":1,"n_routed_experts":64,
    "n_shared_experts":2,"norm_topk_prob":false,"num_attention_heads":16,"num_experts_per_tok":6,
    "num_hidden_layers":27,"num_key_value_heads":16,"pretraining_tp":1,"q_lora_rank":null,
    "qk_nope_head_dim":128,"qk_rope_head_dim":64,"rms_norm_eps":1e-06,)" +
           yarn_of_v2 + R"("rope_theta":10000,"routed_scaling_factor":1.0,"scoring_func":"softmax",
    "seq_aux":true,"topk_group":1,"topk_method":"greedy","torch_dtype":"bfloat16",
    "v_head_dim":128,"vocab_size":102400})");
  EXPECT_EQ(sizes(), "27 2048 16 16 192");
  EXPECT_EQ(ranks(), "0 512 128 64 128");

  describe(R"({"architectures":["DeepseekV3ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"auto_map":{"AutoConfig":"configuration_deepseek.DeepseekV3Config"},
    "ep_size":1,"first_k_dense_replace":3,"hidden_act":"silu","hidden_size":7168,
    "initializer_range":0.02,"intermediate_size":18432,"kv_lora_rank":512,
    "max_position_embeddings":163840,"model_type":"deepseek_v3","moe_intermediate_size":2048,
    "moe_layer_freq":1,"n_group":8,"n_routed_experts":256,"n_shared_experts":1,
    "norm_topk_prob":true,"num_attention_heads":128,"num_experts_per_tok":8,
    "num_hidden_layers":61,"num_key_value_heads":128,"num_nextn_predict_layers":1,
    "q_lora_rank":1536,"qk_nope_head_dim":128,"qk_rope_head_dim":64,"quantization_config":{
    "activation_scheme":"dynamic","fmt":"e4m3","quant_method":"fp8","weight_block_size":[128,128]},
    "rms_norm_eps":1e-06,"rope_scaling":{"beta_fast":32,"beta_slow":1,"factor":40,"mscale":1.0,
    "mscale_all_dim":1.0,"original_max_position_embeddings":4096,"type":"yarn"},
    "rope_theta":10000,"routed_scaling_factor":2.5,"scoring_func":"sigmoid","topk_group":4,
    "topk_method":"noaux_tc","torch_dtype":"bfloat16","v_head_dim":128,"vocab_size":129280})");
  EXPECT_EQ(sizes(), "61 7168 128 128 192");
  EXPECT_EQ(ranks(), "1536 512 128 64 128");
  EXPECT_DOUBLE_EQ(*latent(60).scale, scale(1));
  EXPECT_EQ(latent(60).rope.layout, RopeLayout::kInterleaved);
  EXPECT_EQ(rope_magnitude(latent(60).rope.scaling), 1);
  EXPECT_EQ(latent(60).rope.scaling.original_context, 4096);
  EXPECT_TRUE(latent(60).causal && latent(60).query_norm && latent(60).kv_norm);
  EXPECT_FALSE(latent(60).kv_bias || latent(60).out_bias);
  // What the cache holds of a token.
  EXPECT_EQ(latent(60).kv_rank + latent(60).rope_dim, 576);
}

TEST_F(PublishedConfigs, Gemma2) {
  describe(R"({"_name_or_path":"google/gemma-2-9b","architectures":["Gemma2ForCausalLM"],
    "attention_bias":false,"attention_dropout":0.0,"attn_logit_softcapping":50.0,
    "cache_implementation":"hybrid","final_logit_softcapping":30.0,"head_dim":256,
    "hidden_act":"gelu_pytorch_tanh","hidden_activation":"gelu_pytorch_tanh","hidden_size":3584,
    "max_position_embeddings":8192,"model_type":"gemma2","num_attention_heads":16,
    "num_hidden_layers":42,"num_key_value_heads":8,"query_pre_attn_scalar":256,
    "rms_norm_eps":1e-06,"rope_theta":10000.0,"sliding_window":4096,"sliding_window_size":4096,
    "torch_dtype":"bfloat16","use_cache":true,"vocab_size":256000})");
  EXPECT_EQ(sizes(), "42 3584 16 8 256");
  EXPECT_EQ(layer(0).softcap, 50);
  EXPECT_EQ(layer(0).scale, 1.0 / 16);
  EXPECT_EQ(layer(0).window_left, 4095);
  EXPECT_FALSE(layer(1).window_left.has_value());
}

TEST_F(PublishedConfigs, GptOss) {
  std::string types;
  for (int i = 0; i < 18; ++i) {
    types += std::string(i == 0 ? "" : ",") + "\"sliding_attention\",\"full_attention\"";
  }
  describe(R"({"architectures":["GptOssForCausalLM"],"attention_bias":true,
    "attention_dropout":0.0,"experts_per_token":4,"head_dim":64,"hidden_act":"silu",
    "hidden_size":2880,"initial_context_length":4096,"intermediate_size":2880,"layer_types":[)" +
           types + R"(],"max_position_embeddings":131072,"model_type":"gpt_oss",
    "num_attention_heads":64,"num_experts_per_tok":4,"num_hidden_layers":36,
    "num_key_value_heads":8,"num_local_experts":128,"output_router_logits":false,
    "quantization_config":{"modules_to_not_convert":["model.layers.*.self_attn"],
    "quant_method":"mxfp4"},"rms_norm_eps":1e-05,"rope_scaling":{"beta_fast":32.0,"beta_slow":1.0,
    "factor":32.0,"original_max_position_embeddings":4096,"rope_type":"yarn","truncate":false},
    "rope_theta":150000,"router_aux_loss_coef":0.9,"sliding_window":128,"swiglu_limit":7.0})");
  EXPECT_EQ(sizes(), "36 2880 64 8 64");
  EXPECT_TRUE(layer(35).sinks && layer(35).out_bias);
  EXPECT_EQ(layer(34).window_left, 127);
  EXPECT_FALSE(layer(35).window_left.has_value());
  EXPECT_FALSE(layer(35).rope->scaling.truncate);
}

TEST_F(PublishedConfigs, Falcon) {
  describe(R"({"architectures":["FalconForCausalLM"],"attention_dropout":0.0,"auto_map":{
    "AutoConfig":"configuration_falcon.FalconConfig"},"bias":false,"hidden_dropout":0.0,
    "hidden_size":8192,"layer_norm_epsilon":1e-05,"model_type":"falcon","multi_query":true,
    "new_decoder_architecture":true,"num_attention_heads":128,"num_hidden_layers":60,
    "num_kv_heads":8,"parallel_attn":true,"torch_dtype":"bfloat16","vocab_size":65024})");
  EXPECT_EQ(sizes(), "60 8192 128 8 64");
  describe(R"({"model_type":"falcon","hidden_size":2048,"num_hidden_layers":24,
    "num_attention_heads":32,"multi_query":false,"new_decoder_architecture":false,
    "parallel_attn":false,"alibi":true,"bias":true,"layer_norm_epsilon":1e-5})");
  EXPECT_EQ(sizes(), "24 2048 32 32 64");
  EXPECT_DOUBLE_EQ(layer(0).alibi_slopes[31], alibi_slopes(32)[31] / 8);
}

TEST_F(PublishedConfigs, GptsBloomAndBert) {
  describe(R"({"activation_function":"gelu_new","architectures":["GPT2LMHeadModel"],
    "attn_pdrop":0.1,"embd_pdrop":0.1,"layer_norm_epsilon":1e-05,"model_type":"gpt2","n_ctx":1024,
    "n_embd":768,"n_head":12,"n_layer":12,"n_positions":1024,"resid_pdrop":0.1,
    "summary_first_dropout":0.1,"summary_type":"cls_index","task_specific_params":{
    "text-generation":{"do_sample":true,"max_length":50}},"vocab_size":50257})");
  EXPECT_EQ(sizes(), "12 768 12 12 64");
  EXPECT_TRUE(layer(0).causal && layer(0).out_bias);

  describe(R"({"architectures":["GPTBigCodeForCausalLM"],"attention_softmax_in_fp32":true,
    "attn_pdrop":0.1,"inference_runner":0,"max_batch_size":null,"model_type":"gpt_bigcode",
    "multi_query":true,"n_embd":6144,"n_head":48,"n_inner":24576,"n_layer":40,"n_positions":8192,
    "pad_key_length":true,"pre_allocate_kv_cache":false,"scale_attention_softmax_in_fp32":true,
    "scale_attn_weights":true,"validate_runner_input":true,"vocab_size":49152})");
  EXPECT_EQ(sizes(), "40 6144 48 1 128");

  describe(R"({"_name_or_path":"bigscience/bloom-560m","attention_dropout":0.0,
    "apply_residual_connection_post_layernorm":false,"attention_softmax_in_fp32":true,
    "bias_dropout_fusion":true,"hidden_dropout":0.0,"hidden_size":1024,
    "masked_softmax_fusion":true,"model_type":"bloom","n_head":16,"n_inner":null,"n_layer":24,
    "offset_alibi":100,"pretraining_tp":1,"skip_bias_add":true,"skip_bias_add_qkv":false,
    "slow_but_exact":false,"unk_token_id":0,"vocab_size":250880})");
  EXPECT_EQ(sizes(), "24 1024 16 16 64");
  EXPECT_EQ(layer(0).alibi_slopes, alibi_slopes(16));

  describe(R"({"architectures":["BertForMaskedLM"],"attention_probs_dropout_prob":0.1,
    "classifier_dropout":null,"directionality":"bidi","gradient_checkpointing":false,
    "hidden_act":"gelu","hidden_dropout_prob":0.1,"hidden_size":768,"layer_norm_eps":1e-12,
    "max_position_embeddings":300,"model_type":"bert","num_attention_heads":12,
    "num_hidden_layers":12,"pooler_fc_size":768,"pooler_num_attention_heads":12,
    "pooler_num_fc_layers":3,"pooler_size_per_head":128,"pooler_type":"first_token_transform",
    "position_embedding_type":"absolute","type_vocab_size":2,"use_cache":true})");
  EXPECT_EQ(sizes(), "12 768 12 12 64");
  EXPECT_FALSE(layer(0).causal);
  EXPECT_EQ(layer(0).dropout, 0.1);
}

TEST_F(PublishedConfigs, MixtralQwenMoeAndOlmo) {
  describe(R"({"architectures":["MixtralForCausalLM"],"attention_dropout":0.0,"hidden_act":"silu",
    "hidden_size":4096,"intermediate_size":14336,"max_position_embeddings":32768,
    "model_type":"mixtral","num_attention_heads":32,"num_experts_per_tok":2,"num_hidden_layers":32,
    "num_key_value_heads":8,"num_local_experts":8,"output_router_logits":false,
    "rms_norm_eps":1e-05,"rope_theta":1000000.0,"router_aux_loss_coef":0.02,"sliding_window":null,
    "tie_word_embeddings":false,"torch_dtype":"bfloat16","vocab_size":32000})");
  EXPECT_EQ(sizes(), "32 4096 32 8 128");
  EXPECT_FALSE(layer(0).window_left);

  describe(R"({"architectures":["Qwen3MoeForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"decoder_sparse_step":1,"head_dim":128,"hidden_size":2048,
    "intermediate_size":6144,"max_position_embeddings":40960,"max_window_layers":48,
    "mlp_only_layers":[],"model_type":"qwen3_moe","moe_intermediate_size":768,
    "norm_topk_prob":true,"num_attention_heads":32,"num_experts":128,"num_experts_per_tok":8,
    "num_hidden_layers":48,"num_key_value_heads":4,"output_router_logits":false,
    "rms_norm_eps":1e-06,"rope_scaling":null,"rope_theta":1000000.0,"router_aux_loss_coef":0.001,
    "sliding_window":null,"use_sliding_window":false,"vocab_size":151936})");
  EXPECT_EQ(sizes(), "48 2048 32 4 128");
  EXPECT_TRUE(layer(47).qk_norm);

  describe(R"({"architectures":["Olmo2ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"hidden_act":"silu","hidden_size":4096,"intermediate_size":11008,
    "max_position_embeddings":4096,"model_type":"olmo2","num_attention_heads":32,
    "num_hidden_layers":32,"num_key_value_heads":32,"rms_norm_eps":1e-06,"rope_scaling":null,
    "rope_theta":500000,"torch_dtype":"float32","vocab_size":100352})");
  EXPECT_EQ(sizes(), "32 4096 32 32 128");
  EXPECT_EQ(layer(0).qk_norm_span, QkNormSpan::kAllHeads);
}

TEST_F(PublishedConfigs, CoherePhiGemma3AndNeoX) {
  describe(R"({"architectures":["CohereForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"hidden_act":"silu","hidden_size":8192,"intermediate_size":22528,
    "layer_norm_eps":1e-05,"logit_scale":0.0625,"max_position_embeddings":8192,
    "model_max_length":131072,"model_type":"cohere","num_attention_heads":64,
    "num_hidden_layers":40,"num_key_value_heads":64,"pool_step":1,"rope_theta":8000000.0,
    "torch_dtype":"float16","use_cache":true,"vocab_size":256000})");
  EXPECT_EQ(sizes(), "40 8192 64 64 128");
  EXPECT_EQ(layer(0).rope->layout, RopeLayout::kInterleaved);
  EXPECT_FALSE(layer(0).qk_norm);

  // Command R+.
  describe(R"({"architectures":["CohereForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"hidden_act":"silu","hidden_size":12288,"intermediate_size":33792,
    "layer_norm_eps":1e-05,"logit_scale":0.8333333333333334,"max_position_embeddings":8192,
    "model_type":"cohere","num_attention_heads":96,"num_hidden_layers":64,
    "num_key_value_heads":8,"pad_token_id":0,"rope_theta":75000000.0,"torch_dtype":"float16",
    "use_cache":true,"use_qk_norm":true,"vocab_size":256000})");
  EXPECT_EQ(sizes(), "64 12288 96 8 128");
  EXPECT_TRUE(layer(0).qk_norm && layer(0).qk_norm_centered);
  EXPECT_EQ(layer(0).qk_norm_span, QkNormSpan::kEachHead);
  EXPECT_EQ(layer(0).qk_norm_epsilon, 1e-5);

  describe(R"({"architectures":["Phi3ForCausalLM"],"attention_bias":false,"attention_dropout":0.0,
    "auto_map":{"AutoConfig":"configuration_phi3.Phi3Config"},"embd_pdrop":0.0,"hidden_act":"silu",
    "hidden_size":3072,"intermediate_size":8192,"max_position_embeddings":4096,
    "model_type":"phi3","num_attention_heads":32,"num_hidden_layers":32,"num_key_value_heads":32,
    "original_max_position_embeddings":4096,"resid_pdrop":0.0,"rms_norm_eps":1e-05,
    "rope_scaling":null,"rope_theta":10000.0,"sliding_window":2047,"torch_dtype":"bfloat16"})");
  EXPECT_EQ(sizes(), "32 3072 32 32 96");
  EXPECT_EQ(layer(31).window_left, 2046);
  EXPECT_EQ(layer(31).rope->rotary_dim, 0);

  describe(R"({"architectures":["Gemma3ForCausalLM"],"attention_bias":false,
    "attention_dropout":0.0,"attn_logit_softcapping":null,"cache_implementation":"hybrid",
    "final_logit_softcapping":null,"head_dim":256,"hidden_activation":"gelu_pytorch_tanh",
    "hidden_size":1152,"intermediate_size":6912,"max_position_embeddings":32768,
    "model_type":"gemma3_text","num_attention_heads":4,"num_hidden_layers":26,
    "num_key_value_heads":1,"query_pre_attn_scalar":256,"rms_norm_eps":1e-06,
    "rope_local_base_freq":10000,"rope_scaling":null,"rope_theta":1000000,"sliding_window":512,
    "sliding_window_pattern":6,"vocab_size":262144})");
  EXPECT_EQ(sizes(), "26 1152 4 1 256");
  EXPECT_EQ(layer(4).window_left, 511);
  EXPECT_EQ(layer(4).rope->base, 10000);
  EXPECT_FALSE(layer(5).window_left);
  EXPECT_EQ(layer(5).rope->base, 1000000);
  EXPECT_EQ(layer(5).qk_norm_offset, 1);

  describe(R"({"architectures":["GPTNeoXForCausalLM"],"bos_token_id":0,"eos_token_id":0,
    "hidden_act":"gelu","hidden_size":768,"initializer_range":0.02,"intermediate_size":3072,
    "layer_norm_eps":1e-05,"max_position_embeddings":2048,"model_type":"gpt_neox",
    "num_attention_heads":12,"num_hidden_layers":12,"rotary_emb_base":10000,"rotary_pct":0.25,
    "tie_word_embeddings":false,"torch_dtype":"float16","use_parallel_residual":true})");
  EXPECT_EQ(sizes(), "12 768 12 12 64");
  EXPECT_EQ(layer(0).rope->rotary_dim, 16);
  EXPECT_TRUE(layer(0).query_bias && layer(0).out_bias);
}

}  // namespace
}  // namespace ladon::test
