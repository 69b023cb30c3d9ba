// The shape of a model's attention: what `ladon plan` needs to know of it.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace ladon::cli {

struct ModelShape {
  std::string name;   // as the command line has it: "llama-3-8b"
  std::string title;  // as it is printed: "Llama 3 8B"
  std::int64_t embed_dim = 0;
  std::int64_t num_heads = 0;
  std::int64_t num_kv_heads = 0;  // 0 for MLA
  std::int64_t head_dim = 0;      // of MLA: without the rope part
  std::int64_t value_dim = 0;
  std::int64_t kv_rank = 0;  // of MLA; 0 for all others
  std::int64_t rope_dim = 0;
  /// For each layer the keys that a query can see at most; 0 where it sees all.
  std::vector<std::int64_t> windows{};
  std::int64_t max_context = 0;   // that the model was made for; 0: not known
  std::int64_t weight_bytes = 0;  // of all its weights, as published; 0: not known
  bool loadable = true;           // whether load_attention() knows the family

  std::int64_t num_layers() const { return static_cast<std::int64_t>(windows.size()); }
  bool has_windows() const;
  /// "MHA", "GQA", "MQA" or "MLA".
  std::string_view kind() const;
};

/// Published models, by their configs.
std::span<const ModelShape> model_presets();
/// Throws UsageError that names those there are.
const ModelShape& model_preset(std::string_view name);

/// From a config.json under any name, the folder that it is in, a pipe, or "-" for standard input.
/// A family that Ladon does not load is described by the usual fields. Throws Failure.
ModelShape model_from_config(const std::string& path,
                             const std::vector<std::string>& ignored_fields);

}  // namespace ladon::cli
