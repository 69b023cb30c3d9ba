#include "model_config.h"

#include <algorithm>
#include <array>
#include <fstream>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "failure.h"

namespace ladon::cli {
namespace {

using Json = nlohmann::json;

// Far above any model's, and so low that no product of three of them overflows.
constexpr double kMost = 1 << 24;

/// The fields of one config by any of the names that families give them.
class Fields {
 public:
  Fields(const Json& object, std::string path) : object_(object), path_(std::move(path)) {}

  std::optional<double> number(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      const auto found = object_.find(name);
      if (found == object_.end() || !found->is_number()) continue;
      return found->get<double>();
    }
    return {};
  }
  std::optional<std::int64_t> count(std::initializer_list<const char*> names) const {
    const auto value = number(names);
    if (!value) return {};
    if (*value < 1 || *value > kMost) {
      throw Failure("plan: --config: " + path_ + ": " + *names.begin() +
                    ": expected a whole number from 1 to " + std::to_string(1 << 24));
    }
    return static_cast<std::int64_t>(*value);
  }
  std::int64_t needed(std::initializer_list<const char*> names) const {
    const auto value = count(names);
    if (!value) {
      throw Failure("plan: --config: " + path_ + ": " + *names.begin() +
                    ": got none, expected a whole number");
    }
    return *value;
  }
  std::string text(const char* name) const {
    const auto found = object_.find(name);
    return found != object_.end() && found->is_string() ? found->get<std::string>() : std::string();
  }
  std::optional<bool> flag(const char* name) const {
    const auto found = object_.find(name);
    if (found == object_.end() || !found->is_boolean()) return {};
    return found->get<bool>();
  }
  const Json* list(const char* name) const {
    const auto found = object_.find(name);
    return found != object_.end() && found->is_array() ? &*found : nullptr;
  }
  const Json& object() const { return object_; }

 private:
  const Json& object_;
  std::string path_;
};

/// The families whose MLP has two matrices; all others have three (gate, up, down).
bool has_plain_mlp(const std::string& family) {
  constexpr std::array<std::string_view, 12> kPlain{"bert", "bloom",       "codegen", "falcon",
                                                    "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox",
                                                    "gptj", "mpt",         "opt",     "phi"};
  return std::find(kPlain.begin(), kPlain.end(), family) != kPlain.end();
}

/// The families whose output layer is the table of embeddings where the config does not say, as in
/// transformers; all others have two tables.
bool ties_embeddings(const std::string& family) {
  constexpr std::array<std::string_view, 13> kTied{
      "bert", "bloom",   "cohere", "cohere2", "falcon",  "gpt2",      "gpt_bigcode",
      "opt",  "gpt_neo", "mpt",    "t5",      "smollm3", "starcoder2"};
  return family.starts_with("gemma") ||
         std::find(kTied.begin(), kTied.end(), family) != kTied.end();
}

ModelShape read_shape(const Fields& fields) {
  ModelShape shape;
  const std::int64_t layers =
      fields.needed({"num_hidden_layers", "n_layer", "n_layers", "num_layers"});
  shape.embed_dim = fields.needed({"hidden_size", "n_embd", "n_embed", "d_model"});
  shape.num_heads = fields.needed({"num_attention_heads", "n_head", "n_heads", "num_heads"});
  shape.head_dim = shape.value_dim =
      fields.count({"head_dim"})
          .value_or(std::max<std::int64_t>(1, shape.embed_dim / shape.num_heads));
  const bool multi_query = fields.flag("multi_query").value_or(false);
  shape.num_kv_heads = fields.count({"num_key_value_heads", "num_kv_heads", "n_head_kv"})
                           .value_or(multi_query ? 1 : shape.num_heads);
  if (const auto rank = fields.count({"kv_lora_rank"})) {
    shape.kv_rank = *rank;
    shape.rope_dim = fields.needed({"qk_rope_head_dim"});
    shape.head_dim = fields.needed({"qk_nope_head_dim"});
    shape.value_dim = fields.count({"v_head_dim"}).value_or(shape.head_dim);
    shape.num_kv_heads = 0;
  }
  const bool unused = !fields.flag("use_sliding_window").value_or(true);
  const std::int64_t window =
      unused ? 0 : fields.count({"sliding_window", "sliding_window_size"}).value_or(0);
  const Json* const types = fields.list("layer_types");
  const auto pattern = fields.count({"sliding_window_pattern"});
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    bool windowed = window > 0;
    if (types != nullptr && static_cast<std::size_t>(layer) < types->size()) {
      windowed = windowed && (*types)[static_cast<std::size_t>(layer)] == "sliding_attention";
    } else if (pattern) {
      windowed = windowed && (layer + 1) % *pattern != 0;
    }
    shape.windows.push_back(windowed ? window : 0);
  }
  shape.max_context =
      fields.count({"max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"})
          .value_or(0);
  return shape;
}

/// Of an attention layer, biases and norms aside.
double attention_parameters(const Fields& fields, const ModelShape& shape) {
  const auto embed = static_cast<double>(shape.embed_dim);
  const auto heads = static_cast<double>(shape.num_heads);
  const auto dim = static_cast<double>(shape.head_dim);
  const auto value = static_cast<double>(shape.value_dim);
  if (shape.kv_rank == 0)
    return 2 * embed * dim * (heads + static_cast<double>(shape.num_kv_heads));
  const auto rope = static_cast<double>(shape.rope_dim);
  const auto rank = static_cast<double>(shape.kv_rank);
  const double query_rank = fields.number({"q_lora_rank"}).value_or(0);
  const double query = heads * (dim + rope);
  return (query_rank == 0 ? embed * query : query_rank * (embed + query)) + embed * (rank + rope) +
         rank * heads * (dim + value) + embed * heads * value;
}

double parameters_of(const Fields& fields, const ModelShape& shape, const std::string& family) {
  const auto vocabulary = fields.number({"vocab_size"});
  if (!vocabulary) return 0;
  const auto embed = static_cast<double>(shape.embed_dim);
  const auto layers = static_cast<double>(shape.num_layers());
  const double matrices = has_plain_mlp(family) ? 2 : 3;
  const double inner =
      fields.number({"intermediate_size", "n_inner", "ffn_hidden_size"}).value_or(4 * embed);
  const double dense = matrices * embed * inner;
  const double experts =
      fields.number({"num_local_experts", "n_routed_experts", "num_experts"}).value_or(0);
  double mlps = layers * dense;
  if (experts > 0) {
    const double expert_inner = fields.number({"moe_intermediate_size"}).value_or(inner);
    const double shared = fields.number({"n_shared_experts"}).value_or(0) * expert_inner +
                          fields.number({"shared_expert_intermediate_size"}).value_or(0);
    const double first = std::min(layers, fields.number({"first_k_dense_replace"}).value_or(0));
    mlps = first * dense +
           (layers - first) * embed * (matrices * (experts * expert_inner + shared) + experts);
  }
  const double tables =
      fields.flag("tie_word_embeddings").value_or(ties_embeddings(family)) ? 1 : 2;
  return *vocabulary * embed * tables + layers * attention_parameters(fields, shape) + mlps;
}

double bytes_of_parameter(const Fields& fields) {
  const auto quantised = fields.object().find("quantization_config");
  if (quantised != fields.object().end() && quantised->is_object()) {
    const Fields how(*quantised, {});
    if (const auto bits = how.number({"bits", "w_bit"})) return *bits / 8;
    if (how.text("quant_method") == "fp8") return 1;
    if (how.text("quant_method") == "mxfp4") return 4.25 / 8;
    if (how.flag("load_in_4bit").value_or(false)) return 0.5;
  }
  for (const char* name : {"dtype", "torch_dtype"}) {
    const std::string dtype = fields.text(name);
    if (dtype == "float32") return 4;
    if (dtype == "float64") return 8;
  }
  return 2;
}

/// Published configs of Gemma 3's larger models leave out what is transformers' default.
Json with_defaults(Json text) {
  if (text.value("model_type", Json()) != "gemma3_text") return text;
  Json all{{"hidden_size", 2304},      {"intermediate_size", 9216},
           {"num_hidden_layers", 26},  {"num_attention_heads", 8},
           {"num_key_value_heads", 4}, {"head_dim", 256},
           {"vocab_size", 262208},     {"max_position_embeddings", 131072},
           {"sliding_window", 4096},   {"sliding_window_pattern", 6}};
  all.update(text);
  return all;
}

}  // namespace

ModelConfig read_model_config(const std::string& path) {
  std::ifstream file(path);
  const Json document = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!document.is_object()) {
    throw Failure("plan: --config: " + path + ": expected a JSON object");
  }
  // Models that see pictures keep what concerns text in an object.
  const auto part = document.find("text_config");
  const bool inside = part != document.end() && part->is_object();
  const Json text = with_defaults(inside ? *part : document);
  const Fields fields(text, path);
  ModelConfig config;
  config.family = fields.text("model_type");
  if (config.family.empty()) config.family = Fields(document, path).text("model_type");
  config.shape = read_shape(fields);
  config.num_parameters = parameters_of(fields, config.shape, config.family);
  config.bytes_per_parameter = bytes_of_parameter(Fields(document, path));
  return config;
}

}  // namespace ladon::cli
