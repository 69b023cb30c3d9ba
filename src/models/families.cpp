// The table, and what is particular to one family. Facts are from the published models' code and
// files; docs/design.md says which of their accidents are not followed.
#include "models/families.h"

#include <array>
#include <cmath>

#include "core/checks.h"
#include "ladon/alibi.h"

namespace ladon::models {
namespace {

/// Models of the GPT-2 line can leave out the division by sqrt(head_dim).
void read_attention_scale(ConfigFields& fields, FamilyOptions& options) {
  if (!fields.flag("scale_attn_weights", true)) options.shared.scale = 1;
}

void read_gpt2(ConfigFields& fields, FamilyOptions& options) {
  read_attention_scale(fields, options);
  options.scale_by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false);
}

void read_bigcode(ConfigFields& fields, FamilyOptions& options) {
  read_attention_scale(fields, options);
  // Newer files repeat what multi_query says.
  const auto repeated = fields.optional_number("num_key_value_heads");
  const auto expected = static_cast<double>(options.shared.num_kv_heads);
  if (repeated && *repeated != expected) {
    fields.refuse("num_key_value_heads", "got " + text_of(*repeated) + ", expected " +
                                             text_of(expected) + " by multi_query");
  }
}

void read_query_scale(ConfigFields& fields, FamilyOptions& options) {
  const double scalar = fields.number("query_pre_attn_scalar");
  if (!(scalar > 0)) {
    fields.refuse("query_pre_attn_scalar",
                  "got " + text_of(scalar) + ", expected a positive number");
  }
  options.shared.scale = 1 / std::sqrt(scalar);
}

void read_gemma2(ConfigFields& fields, FamilyOptions& options) {
  read_query_scale(fields, options);
  if (!fields.has("attn_logit_softcapping")) {
    fields.refuse("attn_logit_softcapping", "got none, expected a number, or null for none");
  }
  options.shared.softcap = fields.number("attn_logit_softcapping", 0);
}

void read_bloom(ConfigFields&, FamilyOptions& options) {
  options.shared.alibi_slopes = alibi_slopes(options.shared.num_heads);
}

void read_falcon(ConfigFields& fields, FamilyOptions& options) {
  if (!fields.flag("alibi", false)) return;
  // Falcon adds ALiBi before it divides by sqrt(head_dim), so that its slopes are divided too.
  const double width = static_cast<double>(options.shared.embed_dim);
  const double heads = static_cast<double>(options.shared.num_heads);
  options.shared.alibi_slopes = alibi_slopes(options.shared.num_heads);
  for (double& slope : options.shared.alibi_slopes) slope /= std::sqrt(std::floor(width / heads));
  options.rope.clear();
}

void read_bert(ConfigFields& fields, FamilyOptions& options) {
  const std::string positions =
      fields.optional_text("position_embedding_type").value_or("absolute");
  if (positions != "absolute") {
    fields.refuse("position_embedding_type",
                  "got \"" + positions + "\", expected absolute: Ladon does not honour others",
                  ErrorCode::kUnsupported);
  }
  options.shared.causal = fields.flag("is_decoder", false);
}

/// DeepSeek-V2 has no such field: its rope is interleaved. transformers can write V3's weights
/// half-split.
void read_deepseek_v2(ConfigFields& fields, FamilyOptions&) {
  if (!fields.flag("rope_interleave", true)) {
    fields.refuse("rope_interleave", "got false, expected true in this family",
                  ErrorCode::kUnsupported);
  }
}

void read_deepseek_v3(ConfigFields& fields, FamilyOptions& options) {
  const bool interleaved = fields.flag("rope_interleave", true);
  options.latent.front().rope.layout =
      interleaved ? RopeLayout::kInterleaved : RopeLayout::kHalfSplit;
}

/// Besides experts and prediction layers, published files name custom code, which has become
/// the library's.
constexpr std::string_view kDeepSeekIrrelevant =
    "auto_map routed_scaling_factor num_local_experts mlp_bias is_decoder";
/// The later models' choice of keys, by a separate indexer.
constexpr std::string_view kDeepSeekIndexer = "index_n_heads index_head_dim index_topk";

/// A row of the many families whose tensors are called as Llama's.
constexpr Family decoder(Family row) {
  row.outer = "model.";
  row.layer = "layers.%.self_attn.";
  row.query = "q_proj";
  row.key = "k_proj";
  row.value = "v_proj";
  row.out = "o_proj";
  row.other_tensors = "rotary_emb.inv_freq";
  return row;
}

constexpr std::array kFamilies = {
    Family{.model_type = "bert",
           .outer = "bert.",
           .layer = "encoder.layer.%.attention.",
           .query = "self.query",
           .key = "self.key",
           .value = "self.value",
           .out = "output.dense",
           .other_tensors = "output.LayerNorm.weight output.LayerNorm.bias "
                            "output.LayerNorm.gamma output.LayerNorm.beta",
           .dropout = "attention_probs_dropout_prob",
           .qkv_bias = BiasRule::kAlways,
           .out_bias = BiasRule::kAlways,
           .causal = false,
           .particular = read_bert,
           .irrelevant = "pooler_num_attention_heads pooler_size_per_head"},
    Family{.model_type = "bloom",
           .outer = "transformer.",
           .layer = "h.%.self_attention.",
           .qkv = QkvStorage::kGrouped,
           .fused = "query_key_value",
           .out = "dense",
           .hidden_size = "hidden_size n_embed",
           .num_heads = "num_attention_heads n_head",
           .num_layers = "num_hidden_layers n_layer",
           .qkv_bias = BiasRule::kAlways,
           .out_bias = BiasRule::kAlways,
           .particular = read_bloom,
           .must_be_off = "skip_bias_add_qkv",
           .irrelevant = "attention_softmax_in_fp32 masked_softmax_fusion bias_dropout_fusion "
                         "offset_alibi skip_bias_add is_decoder"},
    decoder({.model_type = "cohere",
             .qk_norm = true,
             .qk_norm_span = QkNormSpan::kEachHead,
             .qk_norm_centered = true,
             .qk_norm_switch = "use_qk_norm",
             .norm_epsilon = "layer_norm_eps",
             .norm_epsilon_default = 1e-5,
             .kv_heads = KvHeadsRule::kOptionalField,
             .head_dim = "head_dim",
             .bias = "attention_bias",
             .rope_base = 500000,
             .rope_layout = RopeLayout::kInterleaved,
             .irrelevant = "logit_scale is_decoder"}),
    Family{.model_type = "deepseek_v2",
           .latent = true,
           .outer = "model.",
           .layer = "layers.%.self_attn.",
           .other_tensors = "rotary_emb.inv_freq",
           .rope_base = 10000,
           .particular = read_deepseek_v2,
           .must_be_off = kDeepSeekIndexer,
           .irrelevant = kDeepSeekIrrelevant},
    Family{.model_type = "deepseek_v3",
           .latent = true,
           .outer = "model.",
           .layer = "layers.%.self_attn.",
           .other_tensors = "rotary_emb.inv_freq",
           .rope_base = 10000,
           .particular = read_deepseek_v3,
           .must_be_off = kDeepSeekIndexer,
           .irrelevant = kDeepSeekIrrelevant},
    Family{.model_type = "falcon",
           .outer = "transformer.",
           .layer = "h.%.self_attention.",
           .qkv = QkvStorage::kGrouped,
           .fused = "query_key_value",
           .out = "dense",
           .other_tensors = "rotary_emb.inv_freq maybe_rotary.inv_freq",
           .hidden_size = "hidden_size n_embed",
           .num_heads = "num_attention_heads n_head",
           .num_layers = "num_hidden_layers n_layer",
           .kv_heads = KvHeadsRule::kFalcon,
           .bias = "bias",
           .rope_base = 10000,
           .particular = read_falcon,
           // Published files name custom code, which is the library's.
           .irrelevant = "parallel_attn num_ln_in_parallel_attn auto_map is_decoder"},
    decoder({.model_type = "gemma2",
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .head_dim_needed = true,
             .bias = "attention_bias",
             .rope_base = 10000,
             .window = WindowRule::kByType,
             .particular = read_gemma2,
             .must_be_off = "use_bidirectional_attention",
             .irrelevant = "final_logit_softcapping is_decoder"}),
    decoder({.model_type = "gemma3_text",
             .qk_norm = true,
             .qk_norm_offset = 1,
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .head_dim_needed = true,
             .bias = "attention_bias",
             .rope_base = 1000000,
             .rope_theta_of_windows = "rope_local_base_freq",
             .window = WindowRule::kGemma3,
             .particular = read_query_scale,
             // Its code keeps the softcap of its predecessor's configs and never applies it.
             .must_be_off = "use_bidirectional_attention attn_logit_softcapping",
             .irrelevant = "final_logit_softcapping is_decoder"}),
    Family{.model_type = "gpt2",
           .outer = "transformer.",
           .layer = "h.%.attn.",
           .qkv = QkvStorage::kConcatenated,
           .fused = "c_attn",
           .out = "c_proj",
           .transposed = true,
           .other_tensors = "bias masked_bias",  // the causal mask, kept as a tensor
           .hidden_size = "hidden_size n_embd",
           .num_heads = "num_attention_heads n_head",
           .num_layers = "num_hidden_layers n_layer",
           .dropout = "attn_pdrop",
           .qkv_bias = BiasRule::kAlways,
           .out_bias = BiasRule::kAlways,
           .particular = read_gpt2,
           .irrelevant = "reorder_and_upcast_attn n_positions is_decoder"},
    Family{.model_type = "gpt_bigcode",
           .outer = "transformer.",
           .layer = "h.%.attn.",
           .qkv = QkvStorage::kGrouped,
           .fused = "c_attn",
           .out = "c_proj",
           .other_tensors = "bias masked_bias",
           .hidden_size = "hidden_size n_embd",
           .num_heads = "num_attention_heads n_head",
           .num_layers = "num_hidden_layers n_layer",
           .kv_heads = KvHeadsRule::kMultiQuery,
           .dropout = "attn_pdrop",
           .qkv_bias = BiasRule::kAlways,
           .out_bias = BiasRule::kAlways,
           .particular = read_bigcode,
           .irrelevant = "attention_softmax_in_fp32 scale_attention_softmax_in_fp32 n_positions "
                         "pre_allocate_kv_cache pad_key_length is_decoder"},
    Family{.model_type = "gpt_neox",
           .outer = "gpt_neox.",
           .layer = "layers.%.attention.",
           .qkv = QkvStorage::kGrouped,
           .fused = "query_key_value",
           .out = "dense",
           .other_tensors = "bias masked_bias rotary_emb.inv_freq",
           .bias = "attention_bias",
           .bias_default = true,
           .rope_base = 10000,
           .rope_theta = "rotary_emb_base rope_theta",
           .rotary_fraction = "rotary_pct partial_rotary_factor",
           .rotary_fraction_default = 0.25,
           .irrelevant = "use_parallel_residual is_decoder"},
    decoder({.model_type = "gpt_oss",
             .sinks = true,
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .head_dim_needed = true,
             .bias = "attention_bias",
             .bias_default = true,
             .rope_base = 150000,
             .rope_scaling_needed = true,
             .window = WindowRule::kByType,
             .irrelevant = "num_local_experts is_decoder"}),
    Family{.model_type = "ladon_latent",
           .latent = true,
           .converted = true,
           .outer = "model.",
           .layer = "layers.%.self_attn.",
           .other_tensors = "rotary_emb.inv_freq",
           .hidden_size = "hidden_size n_embd n_embed",
           .num_heads = "num_attention_heads n_head",
           .num_layers = "num_hidden_layers n_layer",
           // What the source's config said of attention; its conversion has taken it up.
           .irrelevant = "ladon_source_family rope_theta rope_scaling rope_parameters head_dim "
                         "num_key_value_heads num_kv_heads n_head_kv attention_bias bias "
                         "multi_query new_decoder_architecture query_pre_attn_scalar mlp_bias "
                         "sliding_window use_sliding_window max_window_layers layer_types "
                         "partial_rotary_factor original_max_position_embeddings n_positions "
                         "scale_attn_weights scale_attn_by_inverse_layer_idx is_decoder "
                         "num_local_experts rope_interleaved use_mrope alibi qk_layer_norms"},
    decoder({.model_type = "llama",
             .kv_heads = KvHeadsRule::kOptionalField,
             .head_dim = "head_dim",
             .bias = "attention_bias",
             .rope_base = 10000,
             .must_be_off = "rope_interleaved qk_layer_norms",
             .irrelevant = "mlp_bias is_decoder"}),
    decoder({.model_type = "mistral",
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .qkv_bias = BiasRule::kNever,
             .out_bias = BiasRule::kNever,
             .rope_base = 10000,
             .window = WindowRule::kEveryLayer,
             .must_be_off = "attention_bias",
             .irrelevant = "mlp_bias is_decoder"}),
    decoder({.model_type = "mixtral",
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .qkv_bias = BiasRule::kNever,
             .out_bias = BiasRule::kNever,
             .rope_base = 1000000,
             .window = WindowRule::kEveryLayer,
             .must_be_off = "attention_bias",
             .irrelevant = "num_local_experts is_decoder"}),
    decoder({.model_type = "olmo2",
             .qk_norm = true,
             .qk_norm_span = QkNormSpan::kAllHeads,
             .norm_epsilon_default = 1e-5,
             .kv_heads = KvHeadsRule::kOptionalField,
             .head_dim = "head_dim",
             .bias = "attention_bias",
             .rope_base = 10000,
             .irrelevant = "is_decoder"}),
    decoder({.model_type = "phi3",
             .qkv = QkvStorage::kConcatenated,
             .fused = "qkv_proj",
             .kv_heads = KvHeadsRule::kOptionalField,
             .qkv_bias = BiasRule::kNever,
             .out_bias = BiasRule::kNever,
             .rope_base = 10000,
             .rotary_fraction = "partial_rotary_factor",
             .window = WindowRule::kEveryLayer,
             .must_be_off = "attention_bias",
             // Published files name custom code, which has become the library's.
             .irrelevant = "auto_map is_decoder"}),
    decoder({.model_type = "qwen2",
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .qkv_bias = BiasRule::kAlways,
             .out_bias = BiasRule::kNever,
             .rope_base = 10000,
             .window = WindowRule::kQwen,
             .must_be_off = "use_mrope",
             .irrelevant = "is_decoder"}),
    decoder({.model_type = "qwen3",
             .qk_norm = true,
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .head_dim_needed = true,
             .bias = "attention_bias",
             .rope_base = 10000,
             .window = WindowRule::kQwen,
             .must_be_off = "use_mrope",
             .irrelevant = "is_decoder"}),
    decoder({.model_type = "qwen3_moe",
             .qk_norm = true,
             .kv_heads = KvHeadsRule::kField,
             .head_dim = "head_dim",
             .bias = "attention_bias",
             .rope_base = 10000,
             .window = WindowRule::kQwenEvery,
             .must_be_off = "use_mrope",
             .irrelevant = "num_local_experts decoder_sparse_step is_decoder"}),
};

}  // namespace

std::span<const Family> families() noexcept { return kFamilies; }

const Family* find_family(std::string_view model_type) noexcept {
  for (const Family& family : kFamilies) {
    if (family.model_type == model_type) return &family;
  }
  return nullptr;
}

std::string family_names() {
  std::string names;
  for (const Family& family : kFamilies) {
    names.append(names.empty() ? "" : ", ").append(family.model_type);
  }
  return names;
}

}  // namespace ladon::models
