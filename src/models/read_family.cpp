// How the columns of the families' table are read from a config.
#include "models/families.h"

#include <utility>

#include "core/checks.h"
#include "core/fail.h"

namespace ladon::models {
namespace {

constexpr std::int64_t kMaxWindow = std::int64_t{1} << 40;

/// Fields of every family that sound like attention and do not change it.
constexpr std::string_view kIrrelevant =
    "model_type max_position_embeddings torch_dtype dtype output_attentions attn_implementation "
    "_attn_implementation _attn_implementation_autoset _attn_implementation_internal "
    "use_flash_attn use_flash_attention _flash_attn_2_enabled keys_to_ignore_at_inference "
    "mask_token_id";

/// Fields of every family that are refused unless they are off.
constexpr std::string_view kMustBeOff =
    "is_encoder_decoder add_cross_attention cross_attention_hidden_size pruned_heads";

void read_sizes(const Family& family, ConfigFields& fields, FamilyOptions& options) {
  MultiHeadAttentionOptions& shared = options.shared;
  options.num_layers = fields.size(family.num_layers, kMaxLayers);
  shared.embed_dim = fields.size(family.hidden_size, kMaxWidth);
  shared.num_heads = fields.size(family.num_heads, kMaxHeads);
  if (family.head_dim_needed) {
    shared.head_dim = fields.size(family.head_dim, kMaxHeadDim);
  } else if (!family.head_dim.empty()) {
    shared.head_dim = fields.optional_size(family.head_dim, kMaxHeadDim).value_or(0);
  }
  shared.num_kv_heads = shared.num_heads;
  switch (family.kv_heads) {
    case KvHeadsRule::kAllHeads: break;
    case KvHeadsRule::kField:
      // Null stands for as many as query heads; a missing field for a number that only the
      // family's code knows.
      if (!fields.has("num_key_value_heads")) fields.size("num_key_value_heads", kMaxHeads);
      [[fallthrough]];
    case KvHeadsRule::kOptionalField:
      shared.num_kv_heads =
          fields.optional_size("num_key_value_heads", kMaxHeads).value_or(shared.num_heads);
      break;
    case KvHeadsRule::kFalcon: {
      const auto given = fields.optional_size("num_kv_heads n_head_kv", kMaxHeads);
      const bool multi_query = fields.flag("multi_query", true);
      if (fields.flag("new_decoder_architecture", false)) {
        shared.num_kv_heads = given.value_or(shared.num_heads);
      } else if (multi_query) {
        shared.num_kv_heads = 1;
      }
      break;
    }
    case KvHeadsRule::kMultiQuery:
      if (fields.flag("multi_query", true)) shared.num_kv_heads = 1;
      break;
  }
}

void read_biases(const Family& family, ConfigFields& fields, MultiHeadAttentionOptions& shared) {
  const bool by_config = !family.bias.empty() && fields.flag(family.bias, family.bias_default);
  const auto rule = [&](BiasRule bias) {
    return bias == BiasRule::kAlways || (bias == BiasRule::kByConfig && by_config);
  };
  shared.query_bias = shared.key_bias = shared.value_bias = rule(family.qkv_bias);
  shared.out_bias = rule(family.out_bias);
}

/// A field that follows from others, and that some files repeat.
void check_repeated(ConfigFields& fields, std::string_view name, std::int64_t expected,
                    std::string_view because) {
  const auto repeated = fields.optional_number(name);
  if (repeated && *repeated != static_cast<double>(expected)) {
    fields.refuse(name, "got " + text_of(*repeated) + ", expected " + std::to_string(expected) +
                            ", " + std::string(because));
  }
}

void read_latent(const Family& family, ConfigFields& fields, FamilyOptions& options) {
  LatentAttentionOptions& latent = options.latent.emplace_back();
  options.num_layers = fields.size(family.num_layers, kMaxLayers);
  latent.embed_dim = fields.size(family.hidden_size, kMaxWidth);
  latent.num_heads = fields.size(family.num_heads, kMaxHeads);
  // Null is an answer: queries without a rank.
  if (!fields.has("q_lora_rank")) {
    fields.refuse("q_lora_rank", "got none, expected a whole number, or null for none");
  }
  latent.query_rank = fields.optional_size("q_lora_rank", kMaxWidth).value_or(0);
  latent.kv_rank = fields.size("kv_lora_rank", kMaxWidth);
  latent.nope_dim = fields.size("qk_nope_head_dim", kMaxHeadDim);
  latent.rope_dim = fields.size("qk_rope_head_dim", kMaxHeadDim);
  latent.value_dim = fields.size("v_head_dim", kMaxHeadDim);
  check_repeated(fields, "num_key_value_heads", latent.num_heads, "as many as attention heads");
  check_repeated(fields, "head_dim", latent.rope_dim, "as qk_rope_head_dim");
  check_repeated(fields, "qk_head_dim", latent.nope_dim + latent.rope_dim,
                 "the sum of qk_nope_head_dim and qk_rope_head_dim");
  const bool bias = fields.flag("attention_bias", false);
  latent.query_bias = bias && latent.query_rank > 0;  // direct queries never have one
  latent.kv_bias = latent.out_bias = bias;
  // rms_norm_eps is that of the blocks' norms; those inside attention have been built with their
  // class's default, in DeepSeek's own code and in transformers.
  latent.norm_epsilon = 1e-6;
  latent.causal = true;
  latent.dropout = fields.number(family.dropout, 0);
}

/// What rope's fractions are of.
std::int64_t head_dim_of(const FamilyOptions& options) {
  if (!options.latent.empty()) return options.latent.front().rope_dim;
  const MultiHeadAttentionOptions& shared = options.shared;
  return shared.head_dim != 0 ? shared.head_dim : shared.embed_dim / shared.num_heads;
}

/// The object that rope was read from.
std::string_view rope_name(ConfigFields& fields) {
  return fields.optional_value("rope_parameters") != nullptr ? "rope_parameters" : "rope_scaling";
}

/// Where one of the two mscales is missing, DeepSeek's own code and transformers differ in what
/// they make of the other.
void check_mscales(ConfigFields& fields, const RopeScalingOptions& scaling) {
  if (scaling.kind != RopeScaling::kYarn || scaling.attention_factor) return;
  const bool plain = scaling.mscale == 1 && scaling.mscale_all_dim == 0;
  if (plain || (scaling.mscale == 0) == (scaling.mscale_all_dim == 0)) return;
  fields.refuse(rope_name(fields),
                "got mscale " + text_of(scaling.mscale) + " and mscale_all_dim " +
                    text_of(scaling.mscale_all_dim) + ", expected both of them or neither",
                ErrorCode::kUnsupported);
}

/// layer_types, one for each layer; empty where the config has none.
std::vector<std::string> read_layer_types(ConfigFields& fields, std::int64_t num_layers) {
  constexpr std::string_view kExpected = "an array of full_attention and sliding_attention";
  const ConfigValue* const list = fields.optional_value("layer_types");
  if (list == nullptr) return {};
  if (list->kind != ConfigValue::Kind::kArray) fields.refuse_kind("layer_types", *list, kExpected);
  if (std::cmp_not_equal(list->items.size(), num_layers)) {
    fields.refuse("layer_types", "got " + std::to_string(list->items.size()) +
                                     " of them, expected one for each of " +
                                     std::to_string(num_layers) + " layers");
  }
  std::vector<std::string> types;
  for (const ConfigValue& item : list->items) {
    if (item.kind != ConfigValue::Kind::kText ||
        (item.text != "full_attention" && item.text != "sliding_attention")) {
      fields.refuse(
          "layer_types", "got " + item.to_string() + ", expected " + std::string(kExpected),
          item.kind == ConfigValue::Kind::kText ? ErrorCode::kUnsupported : ErrorCode::kIo);
    }
    types.push_back(item.text);
  }
  return types;
}

void read_window(const Family& family, ConfigFields& fields, FamilyOptions& options) {
  constexpr std::string_view kWindow = "sliding_window sliding_window_size";
  const auto every = [&](auto&& is_sliding) {
    std::vector<std::string> types;
    for (std::int64_t layer = 0; layer < options.num_layers; ++layer) {
      types.emplace_back(is_sliding(layer) ? "sliding_attention" : "full_attention");
    }
    return types;
  };
  switch (family.window) {
    case WindowRule::kNone: return;
    case WindowRule::kEveryLayer:
      if (!fields.has("sliding_window")) {
        fields.refuse("sliding_window", "got none, expected a whole number, or null for none");
      }
      options.window = fields.optional_size("sliding_window", kMaxWindow).value_or(0);
      if (options.window > 0) options.types = every([](std::int64_t) { return true; });
      return;
    case WindowRule::kGemma3: {
      options.window = fields.size("sliding_window", kMaxWindow);
      options.types = read_layer_types(fields, options.num_layers);
      const std::int64_t pattern =
          fields.optional_size("sliding_window_pattern _sliding_window_pattern", kMaxLayers)
              .value_or(6);
      if (options.types.empty()) {
        options.types = every([=](std::int64_t layer) { return (layer + 1) % pattern != 0; });
      }
      return;
    }
    case WindowRule::kQwenEvery: {
      const auto window = fields.optional_size("sliding_window", kMaxWindow);
      fields.pass_over("max_window_layers");
      if (!fields.flag("use_sliding_window", false)) return;
      if (!window) fields.size("sliding_window", kMaxWindow);
      options.window = *window;
      options.types = every([](std::int64_t) { return true; });
      return;
    }
    case WindowRule::kByType:
      options.window = fields.size(kWindow, kMaxWindow);
      options.types = read_layer_types(fields, options.num_layers);
      if (options.types.empty()) {
        options.types = every([](std::int64_t layer) { return layer % 2 == 0; });
      }
      return;
    case WindowRule::kQwen: {
      const bool used = fields.flag("use_sliding_window", false);
      const auto window = fields.optional_size("sliding_window", kMaxWindow);
      fields.pass_over("max_window_layers");
      options.types = read_layer_types(fields, options.num_layers);
      if (!used) {
        for (const std::string& type : options.types) {
          if (type != "full_attention") {
            fields.refuse("layer_types", "got " + type + ", expected full_attention alone because" +
                                             " use_sliding_window is not true");
          }
        }
        return;
      }
      if (!window) fields.size("sliding_window", kMaxWindow);
      options.window = *window;
      if (options.types.empty()) {
        const double from = fields.number("max_window_layers");
        options.types = every([&](std::int64_t n) { return static_cast<double>(n) >= from; });
      }
      return;
    }
  }
}

void read_multi_head(const Family& family, ConfigFields& fields, FamilyOptions& options) {
  read_sizes(family, fields, options);
  read_biases(family, fields, options.shared);
  options.shared.causal = family.causal;
  options.shared.qk_norm = family.qk_norm && (family.qk_norm_switch.empty() ||
                                              fields.flag(family.qk_norm_switch, false));
  if (options.shared.qk_norm) {
    options.shared.qk_norm_span = family.qk_norm_span;
    options.shared.qk_norm_offset = family.qk_norm_offset;
    options.shared.qk_norm_centered = family.qk_norm_centered;
    options.shared.qk_norm_epsilon =
        fields.number(family.norm_epsilon, family.norm_epsilon_default);
  }
  options.shared.sinks = family.sinks;
  options.shared.dropout = fields.number(family.dropout, 0);
  read_window(family, fields, options);
}

}  // namespace

FamilyOptions read_family(const Family& family, const std::string& path, const ConfigValue& config,
                          const DescribeOptions& given) {
  const std::span<const std::string> ignored = given.ignored_fields;
  ConfigFields fields(path, config);
  FamilyOptions options;
  if (family.converted) {
    read_converted(family, path, fields, ignored, options);
  } else if (family.latent) {
    read_latent(family, fields, options);
  } else {
    read_multi_head(family, fields, options);
  }
  if (family.rope_base > 0) {
    if (family.rope_scaling_needed && fields.optional_value("rope_scaling") == nullptr &&
        fields.optional_value("rope_parameters") == nullptr) {
      fields.refuse("rope_parameters", "got none, expected it, or rope_scaling");
    }
    if (given.rope_context < 0) {
      fail(kConfigOperation, "rope_context",
           "got " + std::to_string(given.rope_context) + ", expected 0 or a number of tokens");
    }
    options.rope = read_rope(fields, path,
                             {.base = family.rope_base,
                              .theta = family.rope_theta,
                              .fraction = family.rotary_fraction,
                              .default_fraction = family.rotary_fraction_default,
                              .theta_of_windows = family.rope_theta_of_windows},
                             head_dim_of(options), given.rope_context, ignored);
    for (auto& [type, rope] : options.rope) rope.layout = family.rope_layout;
    // Only layers of several types can have ropes by their type.
    if (options.types.empty() && !options.rope.contains("")) {
      fields.refuse(rope_name(fields),
                    "got one for each type of layer, expected one for all layers");
    }
  }
  if (family.latent && !family.converted) {
    LatentAttentionOptions& latent = options.latent.front();
    latent.rope = options.rope.at("");
    latent.rope.layout = RopeLayout::kInterleaved;
    check_mscales(fields, latent.rope.scaling);
  }
  if (family.particular != nullptr) family.particular(fields, options);
  fields.require_off(kMustBeOff, ignored);
  fields.require_off(family.must_be_off, ignored);
  // A model that brings its own code may do anything with these fields.
  if (!has_word(family.irrelevant, "auto_map")) fields.require_off("auto_map", ignored);
  fields.pass_over(kIrrelevant);
  fields.pass_over(family.irrelevant);
  fields.finish(ignored, /*only_attention=*/true);
  return options;
}

}  // namespace ladon::models
