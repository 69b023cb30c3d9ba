// Folders of the families with a fused projection, and of BERT.
#include <cmath>
#include <utility>

#include "models/family_case_parts.h"

namespace ladon::test {
namespace {

FamilyCase gpt_like(const std::string& name, const std::string& family, const std::string& config,
                    const std::string& attention, const std::string& outer = "transformer.") {
  FamilyCase setup;
  setup.name = name;
  setup.family = family;
  setup.config = config;
  setup.prefix_in_file = outer + "h.%." + attention + ".";
  setup.prefix_saved = "transformer.h.%." + attention + ".";
  return setup;
}

}  // namespace

std::vector<FamilyCase> falcon_cases() {
  std::vector<FamilyCase> cases;
  const auto falcon = [](const std::string& name, const std::string& rest,
                         const std::string& outer = "transformer.") {
    return gpt_like(name, "falcon", R"({"model_type":"falcon","hidden_size":24,)" + rest,
                    "self_attention", outer);
  };
  const Sizes mqa{24, 4, 1, 6};
  const Finish rope = [](PlainAttention& plain, int) {
    plain.frequencies = plain_frequencies(6, 10000);
  };
  cases.push_back(fused_case(
      falcon("falcon_mqa", R"("num_attention_heads":4,"num_hidden_layers":2,"multi_query":true,
        "alibi":false,"bias":false,"new_decoder_architecture":false,"parallel_attn":true,
        "attention_dropout":0.0,"auto_map":{"AutoConfig":"configuration_falcon.FalconConfig"}})"),
      mqa, "query_key_value", "dense", multi_query_rows(mqa), false, rope));
  const Sizes grouped{24, 6, 2, 4};
  cases.push_back(fused_case(
      falcon("falcon_grouped", R"("n_head":6,"n_layer":2,"n_head_kv":2,"multi_query":true,
        "alibi":false,"bias":true,"new_decoder_architecture":true,"num_ln_in_parallel_attn":2,
        "rope_theta":500000})",
             ""),
      grouped, "query_key_value", "dense", per_group_rows(grouped), true,
      [](PlainAttention& plain, int) { plain.frequencies = plain_frequencies(4, 500000); }));
  const Sizes heads{24, 6, 6, 4};
  cases.push_back(
      fused_case(falcon("falcon_alibi", R"("num_attention_heads":6,"num_hidden_layers":2,
        "multi_query":false,"alibi":true,"bias":true,"new_decoder_architecture":false,
        "rope_theta":10000.0,"rope_scaling":null})"),
                 heads, "query_key_value", "dense", per_head_rows(heads), true,
                 [](PlainAttention& plain, int) {
                   plain.slopes = plain_slopes(6);
                   for (double& slope : plain.slopes) slope /= std::sqrt(4.0);
                 }));
  return cases;
}

std::vector<FamilyCase> gpt_and_bert_cases() {
  std::vector<FamilyCase> cases;
  const Sizes gpt{24, 4, 4, 6};
  const Finish nothing = [](PlainAttention&, int) {};
  // The smallest GPT-2 is published without an outer name and with its causal mask as a tensor.
  FamilyCase gpt2 = gpt_like("gpt2", "gpt2", R"({"model_type":"gpt2","n_embd":24,"n_head":4,
    "n_layer":2,"n_ctx":32,"n_positions":32,"attn_pdrop":0.1,"scale_attn_weights":true,
    "scale_attn_by_inverse_layer_idx":true,"reorder_and_upcast_attn":false})",
                             "attn", "");
  gpt2.other_tensors = {"bias", "masked_bias"};
  cases.push_back(fused_case(
      std::move(gpt2), gpt, "c_attn", "c_proj", thirds_rows(gpt), true,
      [](PlainAttention& plain, int layer) { plain.scale /= layer + 1; },
      /*transposed=*/true));
  for (int layer = 0; layer < 2; ++layer) {
    cases.back().tensors.emplace("h." + std::to_string(layer) + ".attn.bias",
                                 TensorMaker(1).make({1, 1, 32, 32}, 1));
    cases.back().tensors.emplace("h." + std::to_string(layer) + ".attn.masked_bias",
                                 TensorMaker(1).make({}, 1));
  }
  cases.push_back(fused_case(
      gpt_like("gpt2_unscaled", "gpt2", R"({"model_type":"gpt2","hidden_size":24,
        "num_attention_heads":4,"num_hidden_layers":2,"scale_attn_weights":false})",
               "attn"),
      gpt, "c_attn", "c_proj", thirds_rows(gpt), true,
      [](PlainAttention& plain, int) { plain.scale = 1; }, /*transposed=*/true));
  const Sizes mqa{24, 4, 1, 6};
  cases.push_back(
      fused_case(gpt_like("bigcode_mqa", "gpt_bigcode", R"({"model_type":"gpt_bigcode","n_embd":24,
        "n_head":4,"n_layer":2,"multi_query":true,"attention_softmax_in_fp32":true,
        "scale_attention_softmax_in_fp32":true,"attn_pdrop":0.1,"scale_attn_weights":true,
        "n_positions":64,"pre_allocate_kv_cache":true,"num_key_value_heads":1})",
                          "attn"),
                 mqa, "c_attn", "c_proj", multi_query_rows(mqa), true, nothing));
  cases.push_back(
      fused_case(gpt_like("bigcode_mha", "gpt_bigcode", R"({"model_type":"gpt_bigcode","n_embd":24,
        "n_head":4,"n_layer":2,"multi_query":false})",
                          "attn"),
                 gpt, "c_attn", "c_proj", per_head_rows(gpt), true, nothing));
  const Sizes bloom{24, 6, 6, 4};
  cases.push_back(fused_case(
      gpt_like("bloom", "bloom", R"({"model_type":"bloom","n_embed":24,"num_attention_heads":6,
        "n_layer":2,"offset_alibi":100,"skip_bias_add":true,"skip_bias_add_qkv":false,
        "attention_softmax_in_fp32":true,"masked_softmax_fusion":true,"bias_dropout_fusion":true,
        "apply_residual_connection_post_layernorm":false,"seq_length":2048})",
               "self_attention", ""),
      bloom, "query_key_value", "dense", per_head_rows(bloom), true,
      [](PlainAttention& plain, int) { plain.slopes = plain_slopes(6); }));
  for (const bool decoder : {false, true}) {
    FamilyCase bert;
    bert.name = decoder ? "bert_decoder" : "bert";
    bert.family = "bert";
    bert.config = std::string(R"({"model_type":"bert","hidden_size":24,"num_attention_heads":4,
      "num_hidden_layers":2,"attention_probs_dropout_prob":0.1,"hidden_dropout_prob":0.1,
      "position_embedding_type":"absolute","pooler_num_attention_heads":12,)") +
                  (decoder ? R"("is_decoder":true})" : R"("type_vocab_size":2})");
    bert.prefix_in_file = std::string(decoder ? "" : "bert.") + "encoder.layer.%.attention.";
    bert.prefix_saved = "bert.encoder.layer.%.attention.";
    bert.other_tensors = {"output.LayerNorm.weight", "output.LayerNorm.bias"};
    cases.push_back(separate_case(std::move(bert), gpt, true, true,
                                  [=](PlainAttention& plain, int) { plain.causal = decoder; },
                                  {"self.query", "self.key", "self.value", "output.dense"}));
    FamilyCase& setup = cases.back();
    for (int layer = 0; layer < 2; ++layer) {
      for (const std::string& name : setup.other_tensors) {
        setup.tensors.emplace(layer_prefix(setup.prefix_in_file, layer) + name,
                              TensorMaker(2).make({24}, 1));
      }
    }
  }
  return cases;
}

}  // namespace ladon::test
