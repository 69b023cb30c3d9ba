// describe_model(): a config, read by its family's row and spread over the layers.
#include <cmath>
#include <set>
#include <string>
#include <utility>

#include "core/fail.h"
#include "io/file.h"
#include "ladon/checkpoint.h"
#include "layers/latent_steps.h"
#include "layers/multi_head.h"
#include "models/families.h"

namespace ladon {
namespace {

using models::ConfigFields;
using models::ConfigValue;
using models::Family;
using models::FamilyOptions;

const Family& family_of(ConfigFields& fields) {
  const auto name = fields.optional_text("model_type");
  if (!name) fields.refuse("model_type", "got none, expected one of " + models::family_names());
  const Family* const family = models::find_family(*name);
  if (family == nullptr) {
    fields.refuse("model_type",
                  "got " + io::in_quotes(*name) + ", expected one of " + models::family_names(),
                  ErrorCode::kUnsupported);
  }
  return *family;
}

std::optional<DType> dtype_of_config(ConfigFields& fields) {
  const auto name = fields.optional_text("torch_dtype dtype");
  if (!name) return {};
  constexpr std::pair<std::string_view, DType> kNames[] = {{"float64", DType::kF64},
                                                           {"float32", DType::kF32},
                                                           {"float16", DType::kF16},
                                                           {"bfloat16", DType::kBF16}};
  for (const auto& [text, dtype] : kNames) {
    if (*name == text) return dtype;
  }
  return {};
}

/// The options of one layer.
MultiHeadAttentionOptions layer_of(const FamilyOptions& family, std::int64_t layer) {
  MultiHeadAttentionOptions options = family.shared;
  std::string_view type;
  if (!family.types.empty()) type = family.types[static_cast<std::size_t>(layer)];
  // A window of n keys is the query's own and n - 1 before it.
  if (type == "sliding_attention") options.window_left = family.window - 1;
  if (!family.rope.empty()) {
    auto found = family.rope.find(type);
    if (found == family.rope.end()) found = family.rope.find("");
    options.rope = found->second;
  }
  if (family.scale_by_layer) {
    const double plain =
        options.scale.value_or(1 / std::sqrt(static_cast<double>(options.head_dim)));
    options.scale = plain / static_cast<double>(layer + 1);
  }
  return options;
}

void spread_latent(const FamilyOptions& options, ModelDescription& model) {
  for (const LatentAttentionOptions& each : options.latent) {
    model.layers.emplace_back(latent::complete_options(each));
  }
  if (model.layers.size() == 1) {
    model.layers.resize(static_cast<std::size_t>(options.num_layers),
                        LayerOptions(model.layers[0]));
  }
  const auto& layer = std::get<LatentAttentionOptions>(model.layers.front());
  model.embed_dim = layer.embed_dim;
  model.num_heads = model.num_kv_heads = layer.num_heads;
  model.head_dim = layer.nope_dim + layer.rope_dim;
}

void spread_multi_head(FamilyOptions options, ModelDescription& model) {
  std::set<std::string, std::less<>> checked;
  MultiHeadAttentionOptions first = options.shared;
  first.rope.reset();
  options.shared = multi_head::complete_options(first);
  for (std::int64_t layer = 0; layer < options.num_layers; ++layer) {
    const auto& made =
        std::get<MultiHeadAttentionOptions>(model.layers.emplace_back(layer_of(options, layer)));
    // Layers of one type have one rope, and checking it costs a power for each of its pairs.
    const std::string type =
        options.types.empty() ? "" : options.types[static_cast<std::size_t>(layer)];
    if (checked.insert(type).second) static_cast<void>(multi_head::complete_options(made));
  }
  model.embed_dim = options.shared.embed_dim;
  model.num_heads = options.shared.num_heads;
  model.num_kv_heads = options.shared.num_kv_heads;
  model.head_dim = options.shared.head_dim;
}

ModelDescription spread(const Family& family, const FamilyOptions& options,
                        const std::string& path) {
  for (const std::string& type : options.types) {
    if (!options.rope.empty() && !options.rope.contains(type) && !options.rope.contains("")) {
      fail(ErrorCode::kIo, models::kConfigOperation, path + ": rope_parameters",
           "got none for " + type + ", expected one for each type of layer");
    }
  }
  ModelDescription model{.family = std::string(family.model_type)};
  model.num_layers = options.num_layers;
  try {
    if (!options.latent.empty()) {
      spread_latent(options, model);
    } else {
      spread_multi_head(options, model);
    }
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kOutOfMemory) throw;
    // The message names the option, which is not the caller's: say where it comes from.
    fail(ErrorCode::kIo, models::kConfigOperation, path, error.what());
  }
  return model;
}

}  // namespace

std::vector<std::string> model_families() {
  std::vector<std::string> names;
  for (const Family& family : models::families()) names.emplace_back(family.model_type);
  return names;
}

ModelDescription describe_model(const std::filesystem::path& folder,
                                const DescribeOptions& options) {
  std::error_code error;
  const bool is_file =
      std::filesystem::is_regular_file(folder, error) ||
      (folder.filename() == "config.json" && !std::filesystem::exists(folder, error));
  const std::filesystem::path path = is_file ? folder : folder / "config.json";
  const ConfigValue config = models::read_config(path);
  ConfigFields fields(path.string(), config);
  const Family& family = family_of(fields);
  ModelDescription model =
      spread(family, models::read_family(family, path.string(), config, options), path.string());
  model.dtype = dtype_of_config(fields);
  return model;
}

}  // namespace ladon
