// load_attention() and attention_tensors(): the layers of the families' table.
#include <string>
#include <utility>

#include "core/fail.h"
#include "io/file.h"
#include "ladon/checkpoint.h"
#include "layers/latent_steps.h"
#include "models/stored_tensors.h"

namespace ladon {
namespace {

using models::BiasRule;
using models::Family;
using models::KvHeadsRule;

constexpr std::string_view kLoad = "load_attention";
constexpr std::string_view kSave = "attention_tensors";

const Family& family_named(std::string_view operation, std::string_view name) {
  const Family* const family = models::find_family(name);
  if (family == nullptr) {
    fail(ErrorCode::kUnsupported, operation, "family",
         "got " + io::in_quotes(name) + ", expected one of " + models::family_names());
  }
  return *family;
}

/// "layers.%.self_attn." with the layer's number.
std::string layer_prefix(const Family& family, std::int64_t layer_index) {
  const std::size_t mark = family.layer.find('%');
  return std::string(family.layer.substr(0, mark)) + std::to_string(layer_index) +
         std::string(family.layer.substr(mark + 1));
}

/// The prefix that the files use: with the outer module's name or without.
std::string find_prefix(const models::TensorSource& source, const Family& family,
                        std::int64_t layer_index) {
  const std::string bare = layer_prefix(family, layer_index);
  const std::string whole = std::string(family.outer) + bare;
  bool has_bare = false;
  bool has_whole = false;
  for (const std::string& name : source.names()) {
    has_bare = has_bare || name.starts_with(bare);
    has_whole = has_whole || name.starts_with(whole);
  }
  if (has_bare == has_whole) {
    fail(ErrorCode::kIo, kLoad, source.path(),
         std::string(has_bare ? "got tensors under both " : "got no tensor under ") +
             io::in_quotes(whole) + (has_bare ? " and " : " or ") + io::in_quotes(bare) +
             ", expected the layer's under one of them");
  }
  return has_whole ? whole : bare;
}

void check_bias(BiasRule rule, bool bias, std::string_view parameter, const Family& family) {
  if (bias ? rule != BiasRule::kNever : rule != BiasRule::kAlways) return;
  fail(kSave, "layer",
       std::string(bias ? "got " : "got no ") + std::string(parameter) + ", expected " +
           (bias ? "none" : "one") + " in family " + std::string(family.model_type));
}

/// Refuses a layer that the family has no place for.
void check_can_hold(const Family& family, const MultiHeadAttentionOptions& options) {
  const auto refuse = [&](const std::string& what) {
    fail(kSave, "layer", what + " in family " + std::string(family.model_type));
  };
  check_bias(family.qkv_bias, options.query_bias, "q_proj.bias", family);
  check_bias(family.qkv_bias, options.key_bias, "k_proj.bias", family);
  check_bias(family.qkv_bias, options.value_bias, "v_proj.bias", family);
  check_bias(family.out_bias, options.out_bias, "out_proj.bias", family);
  const bool one_switch = family.qkv != models::QkvStorage::kSeparate || !family.bias.empty();
  if (one_switch &&
      (options.query_bias != options.key_bias || options.query_bias != options.value_bias)) {
    refuse("got biases for some of q, k and v, expected all of them or none");
  }
  const bool optional_norm = !family.qk_norm_switch.empty();
  if (options.qk_norm != family.qk_norm && !optional_norm) {
    refuse(family.qk_norm ? "got no q/k norm, expected one" : "got a q/k norm, expected none");
  }
  if (options.qk_norm && (options.qk_norm_span != family.qk_norm_span ||
                          options.qk_norm_offset != family.qk_norm_offset ||
                          options.qk_norm_centered != family.qk_norm_centered)) {
    refuse(
        "got a q/k norm of another kind (qk_norm_span, qk_norm_offset, qk_norm_centered), expected "
        "the family's");
  }
  if (options.sinks != family.sinks) {
    refuse(family.sinks ? "got no sinks, expected them" : "got sinks, expected none");
  }
  if (options.key_dim != options.embed_dim || options.value_input_dim != options.embed_dim) {
    refuse("got keys or values of another width than the queries, expected one width");
  }
  const std::int64_t width = options.num_heads * options.head_dim;
  if (family.head_dim.empty() && width != options.embed_dim) {
    refuse("got a head_dim of " + std::to_string(options.head_dim) +
           ", expected embed_dim / num_heads");
  }
  const bool all = options.num_kv_heads == options.num_heads;
  const bool one = options.num_kv_heads == 1;
  if ((family.kv_heads == KvHeadsRule::kAllHeads && !all) ||
      (family.kv_heads == KvHeadsRule::kMultiQuery && !all && !one)) {
    refuse("got " + std::to_string(options.num_kv_heads) + " KV heads, expected " +
           (family.kv_heads == KvHeadsRule::kAllHeads ? "" : "1 or ") +
           std::to_string(options.num_heads));
  }
}

/// The same for latent layers.
void check_can_hold(const Family& family, const LatentAttentionOptions& options) {
  const auto refuse = [&](const std::string& what) {
    fail(kSave, "layer", what + " in family " + std::string(family.model_type));
  };
  if (family.converted) {
    if (options.query_rank != 0) refuse("got queries of low rank, expected direct ones");
    if (options.kv_norm) refuse("got a latent with a norm, expected none");
    if (options.rope_dim > 0 && options.rope.layout != RopeLayout::kInterleaved) {
      refuse("got half-split rope, expected interleaved rope");
    }
    return;
  }
  if (options.rope_dim == 0) refuse("got no rope, expected it");
  if (!options.kv_norm || (options.query_rank > 0 && !options.query_norm)) {
    refuse("got a latent without a norm, expected norms");
  }
  if (options.query_rank == 0 && options.query_bias) refuse("got q_proj.bias, expected none");
  if (options.kv_bias != options.out_bias ||
      (options.query_rank > 0 && options.query_bias != options.out_bias)) {
    refuse("got some of the biases, expected all of them or none");
  }
}

/// The options as those of one kind; throws where a description mixes kinds.
template <class Options>
const Options& options_as(const LayerOptions& options, const ModelDescription& model) {
  const Options* const same = std::get_if<Options>(&options);
  if (same == nullptr) {
    fail(kLoad, "model.layers",
         "got options of another kind of layer, expected those of family " + model.family);
  }
  return *same;
}

}  // namespace

models::StoredLayer models::stored_layer(const TensorSource& source, const ModelDescription& model,
                                         std::int64_t layer_index) {
  const Family& family = family_named(kLoad, model.family);
  if (layer_index < 0 || std::cmp_greater_equal(layer_index, model.layers.size())) {
    fail(kLoad, "layer_index",
         "got " + std::to_string(layer_index) + ", expected 0 to " +
             std::to_string(static_cast<std::int64_t>(model.layers.size()) - 1));
  }
  const LayerOptions& layer = model.layers[static_cast<std::size_t>(layer_index)];
  StoredLayer stored;
  if (family.latent) {
    const auto complete =
        latent::complete_options(options_as<LatentAttentionOptions>(layer, model));
    stored.tensors = stored_tensors(complete);
    stored.options = complete;
  } else {
    const auto& multi_head = options_as<MultiHeadAttentionOptions>(layer, model);
    stored.tensors = stored_tensors(family, multi_head);
    stored.options = multi_head;
  }
  stored.names = {.operation = kLoad,
                  .prefix = find_prefix(source, family, layer_index),
                  .other_tensors = family.other_tensors};
  return stored;
}

models::StoredLayer models::stored_layer(const LayerOptions& options, std::string_view family,
                                         std::int64_t layer_index) {
  const Family& row = family_named(kSave, family);
  if (layer_index < 0) {
    fail(kSave, "layer_index", "got " + std::to_string(layer_index) + ", expected 0 or more");
  }
  StoredLayer stored{.names = {.operation = kSave,
                               .prefix = std::string(row.outer) + layer_prefix(row, layer_index)},
                     .tensors = {},
                     .options = options};
  const auto* const latent = std::get_if<LatentAttentionOptions>(&options);
  if ((latent != nullptr) != row.latent) {
    fail(kSave, "layer",
         std::string("got ") + (row.latent ? "multi-head" : "latent") + " attention, expected " +
             (row.latent ? "latent" : "multi-head") + " attention in family " +
             std::string(row.model_type));
  }
  if (latent != nullptr) {
    check_can_hold(row, *latent);
    stored.tensors = stored_tensors(*latent);
  } else {
    const auto& multi_head = std::get<MultiHeadAttentionOptions>(options);
    check_can_hold(row, multi_head);
    stored.tensors = stored_tensors(row, multi_head);
  }
  return stored;
}

std::unique_ptr<AttentionLayer> load_attention(const Context& context,
                                               const std::filesystem::path& folder,
                                               std::int64_t layer_index,
                                               const LoadOptions& options) {
  return as_part_of(kLoad, [&] {
    const ModelDescription model = describe_model(
        folder, {.ignored_fields = options.ignored_fields, .rope_context = options.rope_context});
    return load_attention(context, ShardedSafetensors::open(folder), model, layer_index, options);
  });
}

std::unique_ptr<AttentionLayer> load_attention(const Context& context,
                                               const ShardedSafetensors& weights,
                                               const ModelDescription& model,
                                               std::int64_t layer_index,
                                               const LoadOptions& options) {
  const models::TensorSource source(weights);
  const models::StoredLayer stored = models::stored_layer(source, model, layer_index);
  return std::visit(
      [&](const auto& layer) {
        return models::load_layer(context, source, stored.names, stored.tensors, layer,
                                  options.dtype);
      },
      stored.options);
}

std::vector<SafetensorsItem> items_of(const std::vector<NamedTensor>& tensors) {
  std::vector<SafetensorsItem> items;
  items.reserve(tensors.size());
  for (const NamedTensor& tensor : tensors) items.push_back({tensor.name, tensor.value});
  return items;
}

std::vector<NamedTensor> attention_tensors(const AttentionLayer& layer, std::string_view family,
                                           std::int64_t layer_index) {
  if (family_named(kSave, family).latent) {
    const LatentAttention& latent = models::as_latent(kSave, layer);
    const models::StoredLayer stored = models::stored_layer(latent.options(), family, layer_index);
    return models::save_layer(latent, stored.names.prefix, stored.tensors);
  }
  const MultiHeadAttention& multi_head = models::as_multi_head(kSave, layer);
  const models::StoredLayer stored =
      models::stored_layer(multi_head.options(), family, layer_index);
  return models::save_layer(multi_head, stored.names.prefix, stored.tensors);
}

}  // namespace ladon
