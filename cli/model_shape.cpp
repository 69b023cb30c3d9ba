#include "model_shape.h"

#include <algorithm>
#include <filesystem>
#include <type_traits>
#include <variant>

#include "failure.h"
#include "ladon/checkpoint.h"
#include "ladon/latent_attention.h"
#include "ladon/multi_head_attention.h"

namespace ladon::cli {
namespace {

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

std::vector<ModelShape> make_presets() {
  return {
      deepseek("deepseek-v3", "DeepSeek-V3", 7168, 128, 61),
      deepseek("deepseek-v2", "DeepSeek-V2", 5120, 128, 60),
      deepseek("deepseek-v2-lite", "DeepSeek-V2-Lite", 2048, 16, 27),
      heads("llama-3-8b", "Llama 3 8B", 4096, 32, 8, 128, no_windows(32)),
      heads("llama-3-70b", "Llama 3 70B", 8192, 64, 8, 128, no_windows(80)),
      heads("llama-3.1-405b", "Llama 3.1 405B", 16384, 128, 8, 128, no_windows(126)),
      heads("llama-2-7b", "Llama 2 7B", 4096, 32, 32, 128, no_windows(32)),
      heads("mistral-7b", "Mistral 7B v0.1", 4096, 32, 8, 128, Windows(32, 4096)),
      heads("falcon-7b", "Falcon 7B", 4544, 71, 1, 64, no_windows(32)),
      heads("qwen3-8b", "Qwen3 8B", 4096, 32, 8, 128, no_windows(36)),
      heads("gemma-2-9b", "Gemma 2 9B", 3584, 16, 8, 256, alternating(42, 4096)),
      heads("gpt-oss-20b", "GPT-OSS 20B", 2880, 64, 8, 64, alternating(24, 128)),
      heads("gpt-2", "GPT-2", 768, 12, 12, 64, no_windows(12)),
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
  std::string names;
  for (const ModelShape& preset : model_presets()) {
    if (preset.name == name) return preset;
    names += (names.empty() ? "" : ", ") + preset.name;
  }
  throw UsageError("plan: --model: no preset '" + std::string(name) + "'; there are " + names +
                   " (or give --config)");
}

ModelShape model_from_config(const std::string& path,
                             const std::vector<std::string>& ignored_fields) {
  std::filesystem::path folder = path;
  if (folder.filename() == "config.json") {
    folder = folder.has_parent_path() ? folder.parent_path() : std::filesystem::path(".");
  }
  const ModelDescription model = describe_model(folder, {.ignored_fields = ignored_fields});
  ModelShape shape{.name = model.family,
                   .title = path + " (" + model.family + ")",
                   .embed_dim = model.embed_dim,
                   .num_heads = model.num_heads,
                   .num_kv_heads = model.num_kv_heads,
                   .head_dim = model.head_dim,
                   .value_dim = model.head_dim};
  for (const LayerOptions& layer : model.layers) read_layer(layer, shape);
  return shape;
}

}  // namespace ladon::cli
