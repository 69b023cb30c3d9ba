#include "model_shape.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <type_traits>
#include <variant>

#include "failure.h"
#include "ladon/checkpoint.h"
#include "ladon/error.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"
#include "model_config.h"
#include "names.h"
#include "standard_streams.h"

namespace ladon::cli {
namespace {

namespace fs = std::filesystem;
using Windows = std::vector<std::int64_t>;

Windows no_windows(std::size_t layers) { return Windows(layers, 0); }

/// Every second layer, from the first one on.
Windows alternating(std::size_t layers, std::int64_t window) {
  Windows windows(layers, 0);
  for (std::size_t i = 0; i < layers; i += 2) windows[i] = window;
  return windows;
}

/// An MHA, GQA or MQA model.
ModelShape heads(const char* name, const char* title, std::int64_t embed_dim,
                 std::int64_t num_heads, std::int64_t num_kv_heads, std::int64_t head_dim,
                 Windows windows) {
  return {.name = name,
          .title = title,
          .embed_dim = embed_dim,
          .num_heads = num_heads,
          .num_kv_heads = num_kv_heads,
          .head_dim = head_dim,
          .value_dim = head_dim,
          .windows = std::move(windows)};
}

/// A model of DeepSeek's; they share the sizes of heads and latents.
ModelShape deepseek(const char* name, const char* title, std::int64_t embed_dim,
                    std::int64_t num_heads, std::size_t layers) {
  return {.name = name,
          .title = title,
          .embed_dim = embed_dim,
          .num_heads = num_heads,
          .head_dim = 128,
          .value_dim = 128,
          .kv_rank = 512,
          .rope_dim = 64,
          .windows = no_windows(layers)};
}

/// A preset with what is published about it outside its config.
ModelShape with(ModelShape shape, std::int64_t max_context, double weight_bytes) {
  shape.max_context = max_context;
  shape.weight_bytes = static_cast<std::int64_t>(weight_bytes);
  return shape;
}

/// Weights are the published files': two bytes a parameter, but for DeepSeek-V3's fp8, GPT-OSS's
/// mxfp4 and GPT-2's f32.
std::vector<ModelShape> make_presets() {
  return {
      with(deepseek("deepseek-v3", "DeepSeek-V3", 7168, 128, 61), 163840, 671.0e9),
      with(deepseek("deepseek-v2", "DeepSeek-V2", 5120, 128, 60), 163840, 2 * 235.7e9),
      with(deepseek("deepseek-v2-lite", "DeepSeek-V2-Lite", 2048, 16, 27), 163840, 2 * 15.7e9),
      with(heads("llama-3-8b", "Llama 3 8B", 4096, 32, 8, 128, no_windows(32)), 8192, 2 * 8.03e9),
      with(heads("llama-3-70b", "Llama 3 70B", 8192, 64, 8, 128, no_windows(80)), 8192,
           2 * 70.55e9),
      with(heads("llama-3.1-405b", "Llama 3.1 405B", 16384, 128, 8, 128, no_windows(126)), 131072,
           2 * 405.85e9),
      with(heads("llama-2-7b", "Llama 2 7B", 4096, 32, 32, 128, no_windows(32)), 4096, 2 * 6.74e9),
      with(heads("mistral-7b", "Mistral 7B v0.1", 4096, 32, 8, 128, Windows(32, 4096)), 32768,
           2 * 7.24e9),
      with(heads("falcon-7b", "Falcon 7B", 4544, 71, 1, 64, no_windows(32)), 2048, 2 * 7.22e9),
      with(heads("qwen3-8b", "Qwen3 8B", 4096, 32, 8, 128, no_windows(36)), 40960, 2 * 8.19e9),
      with(heads("gemma-2-9b", "Gemma 2 9B", 3584, 16, 8, 256, alternating(42, 4096)), 8192,
           2 * 9.24e9),
      with(heads("gpt-oss-20b", "GPT-OSS 20B", 2880, 64, 8, 64, alternating(24, 128)), 131072,
           13.76e9),
      with(heads("gpt-2", "GPT-2", 768, 12, 12, 64, no_windows(12)), 1024, 4 * 124.4e6),
  };
}

/// What one layer says of the model. The layers of one model differ in their windows alone.
void read_layer(const LayerOptions& layer, ModelShape& shape) {
  std::visit(
      [&](const auto& options) {
        using Options = std::decay_t<decltype(options)>;
        if constexpr (std::is_same_v<Options, LatentAttentionOptions>) {
          shape.head_dim = options.nope_dim;
          shape.value_dim = options.value_dim == 0 ? options.nope_dim : options.value_dim;
          shape.kv_rank = options.kv_rank;
          shape.rope_dim = options.rope_dim;
          shape.num_kv_heads = 0;
          shape.windows.push_back(0);
        } else {
          shape.windows.push_back(options.window_left ? *options.window_left + 1 : 0);
        }
      },
      layer);
}

/// All bytes of the safetensors files next to a config; 0 where there are none.
std::int64_t bytes_of_files(const fs::path& folder) {
  std::int64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".safetensors") {
      bytes += static_cast<std::int64_t>(entry.file_size(error));
    }
  }
  return bytes;
}

/// `name` is the user's for what is opened as `path`.
ModelShape read_config(const std::string& path, const std::string& name,
                       const std::vector<std::string>& ignored_fields) {
  std::error_code error;
  const bool is_folder = fs::is_directory(path, error);
  ModelShape shape;
  ModelConfig usual;
  bool loadable = true;
  try {
    const ModelDescription model = describe_model(path, {.ignored_fields = ignored_fields});
    usual = read_model_config(is_folder ? (fs::path(path) / "config.json").string() : path);
    shape = {.name = model.family,
             .title = {},
             .embed_dim = model.embed_dim,
             .num_heads = model.num_heads,
             .num_kv_heads = model.num_kv_heads,
             .head_dim = model.head_dim,
             .value_dim = model.head_dim};
    for (const LayerOptions& layer : model.layers) read_layer(layer, shape);
  } catch (const Error& problem) {
    const std::string_view message = problem.what();
    const bool unknown = problem.code() == ErrorCode::kUnsupported &&
                         message.find(": model_type: ") != std::string_view::npos;
    if (!unknown) throw;
    try {
      usual = read_model_config(is_folder ? (fs::path(path) / "config.json").string() : path);
    } catch (const Failure& missing) {
      throw Failure(std::string(missing.what()) + "; " + problem.what());
    }
    shape = usual.shape;
    shape.name = usual.family;
    loadable = false;
  }
  shape.loadable = loadable;
  shape.title = name + " (" + shape.name + ")";
  shape.max_context = usual.shape.max_context;
  const std::int64_t files = is_folder ? bytes_of_files(path) : 0;
  shape.weight_bytes =
      files > 0 ? files
                : static_cast<std::int64_t>(usual.num_parameters * usual.bytes_per_parameter);
  return shape;
}

}  // namespace

bool ModelShape::has_windows() const {
  return std::any_of(windows.begin(), windows.end(), [](std::int64_t w) { return w != 0; });
}

std::string_view ModelShape::kind() const {
  if (kv_rank != 0) return "MLA";
  if (num_kv_heads == num_heads) return "MHA";
  return num_kv_heads == 1 ? "MQA" : "GQA";
}

std::span<const ModelShape> model_presets() {
  static const std::vector<ModelShape> presets = make_presets();
  return presets;
}

const ModelShape& model_preset(std::string_view name) {
  std::vector<std::string> names;
  std::string list;
  for (const ModelShape& preset : model_presets()) {
    if (preset.name == name) return preset;
    names.push_back(preset.name);
    list += (list.empty() ? "" : ", ") + preset.name;
  }
  throw UsageError("plan: --model: no model '" + std::string(name) + "'" +
                   did_you_mean(name, names) + "; there are " + list + " (or give --config)");
}

ModelShape model_from_config(const std::string& path,
                             const std::vector<std::string>& ignored_fields) {
  const std::string opened = input_path("plan: --config", path);
  try {
    return read_config(opened, path == "-" ? "standard input" : path, ignored_fields);
  } catch (const std::exception& error) {
    throw Failure(with_name(error.what(), opened, path));
  }
}

}  // namespace ladon::cli
