// The configs that conversions write: a list with an entry for each layer of everything that may
// differ between them.
//   "ladon_latent": {"kv_ranks": [512, 512], "nope_dims": [128, 128], "value_dim": 128,
//                    "frequencies": [[1.0, 0.5], [1.0, 0.25]], "magnitudes": [1.0, 1.0],
//                    "scales": [0.088, 0.088], "query_bias": false, "kv_bias": false,
//                    "out_bias": false, "causal": true}
// rope_dim is twice the number of a layer's frequencies; pairs are interleaved.
#include <utility>

#include "models/families.h"

namespace ladon::models {
namespace {

using Kind = ConfigValue::Kind;

/// A list with one item for each layer.
const std::vector<ConfigValue>& list_of(ConfigFields& fields, std::string_view name,
                                        std::int64_t num_layers) {
  const ConfigValue* const value = fields.optional_value(name);
  if (value == nullptr) fields.refuse(name, "got none, expected an item for each layer");
  if (value->kind != Kind::kArray) fields.refuse_kind(name, *value, "an item for each layer");
  if (std::cmp_not_equal(value->items.size(), num_layers)) {
    fields.refuse(name, "got " + std::to_string(value->items.size()) +
                            " items, expected one for each of " + std::to_string(num_layers) +
                            " layers");
  }
  return value->items;
}

std::int64_t size_of(const ConfigFields& fields, std::string_view name, const ConfigValue& value,
                     std::int64_t limit) {
  if (value.kind != Kind::kInteger || value.integer < 1 || value.integer > limit) {
    fields.refuse_kind(name, value, "whole numbers from 1 to " + std::to_string(limit));
  }
  return value.integer;
}

double number_of(const ConfigFields& fields, std::string_view name, const ConfigValue& value) {
  if (value.kind != Kind::kInteger && value.kind != Kind::kNumber) {
    fields.refuse_kind(name, value, "numbers");
  }
  return value.number;
}

}  // namespace

void read_converted(const Family& family, const std::string& path, ConfigFields& fields,
                    std::span<const std::string> ignored, FamilyOptions& options) {
  constexpr std::string_view kObject = "ladon_latent";
  options.num_layers = fields.size(family.num_layers, kMaxLayers);
  const ConfigValue* const object = fields.optional_value(kObject);
  if (object == nullptr) fields.refuse(kObject, "got none, expected an object");
  if (object->kind != Kind::kObject) fields.refuse_kind(kObject, *object, "an object");
  ConfigFields inner(path, *object, std::string(kObject));
  const LatentAttentionOptions shared{.embed_dim = fields.size(family.hidden_size, kMaxWidth),
                                      .num_heads = fields.size(family.num_heads, kMaxHeads),
                                      .value_dim = inner.size("value_dim", kMaxHeadDim),
                                      .query_bias = inner.flag("query_bias", false),
                                      .kv_bias = inner.flag("kv_bias", false),
                                      .out_bias = inner.flag("out_bias", false),
                                      .query_norm = false,
                                      .kv_norm = false,
                                      .causal = inner.flag("causal", true),
                                      .dropout = fields.number(family.dropout, 0)};
  const auto& ranks = list_of(inner, "kv_ranks", options.num_layers);
  const auto& nope_dims = list_of(inner, "nope_dims", options.num_layers);
  const auto& frequencies = list_of(inner, "frequencies", options.num_layers);
  const auto& magnitudes = list_of(inner, "magnitudes", options.num_layers);
  const auto& scales = list_of(inner, "scales", options.num_layers);
  inner.finish(ignored, /*only_attention=*/false);
  for (std::size_t n = 0; n < ranks.size(); ++n) {
    LatentAttentionOptions layer = shared;
    layer.kv_rank = size_of(inner, "kv_ranks", ranks[n], kMaxWidth);
    layer.nope_dim = size_of(inner, "nope_dims", nope_dims[n], kMaxHeadDim);
    layer.scale = number_of(inner, "scales", scales[n]);
    if (frequencies[n].kind != Kind::kArray) {
      inner.refuse_kind("frequencies", frequencies[n], "a list for each layer");
    }
    for (const ConfigValue& frequency : frequencies[n].items) {
      layer.rope.frequencies.push_back(number_of(inner, "frequencies", frequency));
    }
    layer.rope_dim = 2 * static_cast<std::int64_t>(layer.rope.frequencies.size());
    const double magnitude = number_of(inner, "magnitudes", magnitudes[n]);
    if (layer.rope_dim > 0) layer.rope.magnitude = magnitude;
    options.latent.push_back(std::move(layer));
  }
}

}  // namespace ladon::models
