// A model folder with other attention: the rest of it is passed through.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "json_output.h"
#include "ladon/checkpoint.h"
#include "ladon/safetensors.h"

namespace ladon::cli {

/// The source's tensors of one layer, by the names that its folder has, and what replaces them.
struct ReplacedLayer {
  std::vector<std::string> before{};
  std::vector<NamedTensor> after{};
};

/// Which tensors `before` are in the folder, and `after` under the same prefix: names in files of a
/// bare model lack the outer module's.
ReplacedLayer replace_layer(const ShardedSafetensors& weights,
                            const std::vector<NamedTensor>& before, std::vector<NamedTensor> after);

/// The folder's config.json.
Json read_config_json(const std::filesystem::path& folder);

/// Throws Failure where `target` is there already, or cannot be written next to.
void check_new_folder(const std::filesystem::path& target);

/// Writes `target` with this config: a file for each of the source's, the other tensors as they
/// are, and copies of the source's other files. Written to a folder next to it and renamed: whole
/// or not at all.
void write_model(const ShardedSafetensors& weights, const Json& config,
                 const std::vector<ReplacedLayer>& layers, const std::filesystem::path& target);

}  // namespace ladon::cli
