#include "model_writer.h"

#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "failure.h"
#include "ladon/error.h"
#include "signals.h"

namespace ladon::cli {
namespace {

namespace fs = std::filesystem;
constexpr const char* kIndex = "model.safetensors.index.json";

void write_text(const fs::path& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary);
  file << text;
  file.close();
  if (!file) throw Failure("convert: --output: cannot write " + path.string());
}

/// A folder that is removed unless it is given its name.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& target)
      : target_(target), temporary_(target.string() + ".partial-" + std::to_string(::getpid())) {
    std::error_code error;
    fs::create_directory(temporary_, error);
    if (error) {
      throw Failure("convert: --output: cannot make " + temporary_.string() + ": " +
                    error.message());
    }
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!temporary_.empty()) fs::remove_all(temporary_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return temporary_; }
  void commit() {
    std::error_code error;
    fs::rename(temporary_, target_, error);
    if (error) {
      throw Failure("convert: --output: cannot rename " + temporary_.string() + " to " +
                    target_.string() + ": " + error.message());
    }
    temporary_.clear();
  }

 private:
  fs::path target_, temporary_;
};

/// Files that are not weights and not the config: tokenizers, licences.
void copy_other_files(const fs::path& from, const fs::path& to) {
  for (const fs::directory_entry& entry : fs::directory_iterator(from)) {
    const std::string name = entry.path().filename().string();
    if (!entry.is_regular_file() || name == "config.json" || name == kIndex ||
        entry.path().extension() == ".safetensors") {
      continue;
    }
    std::error_code error;
    fs::copy_file(entry.path(), to / name, error);
    if (error) {
      throw Failure("convert: --output: cannot copy " + entry.path().string() + ": " +
                    error.message());
    }
  }
}

}  // namespace

ReplacedLayer replace_layer(const ShardedSafetensors& weights,
                            const std::vector<NamedTensor>& before,
                            std::vector<NamedTensor> after) {
  ReplacedLayer layer;
  std::size_t cut = 0;  // letters of the outer module's name that this folder leaves out
  for (const NamedTensor& tensor : before) {
    while (!weights.has(tensor.name.substr(cut))) {
      cut = tensor.name.find('.', cut);
      if (cut == std::string::npos) {
        throw Failure("convert: --model: no tensor " + tensor.name + " in the folder");
      }
      ++cut;
    }
    layer.before.push_back(tensor.name.substr(cut));
  }
  for (NamedTensor& tensor : after) {
    // A layer of another family has another prefix: it goes where that family's bare model has it.
    if (cut > 0) tensor.name.erase(0, tensor.name.find('.') + 1);
  }
  layer.after = std::move(after);
  return layer;
}

Json read_config_json(const fs::path& folder) {
  std::ifstream file(folder / "config.json", std::ios::binary);
  Json config = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!config.is_object()) {
    throw Failure("convert: --model: " + (folder / "config.json").string() +
                  " is not a JSON object");
  }
  return config;
}

void check_new_folder(const fs::path& target) {
  std::error_code error;
  if (fs::exists(fs::symlink_status(target, error))) {
    throw Failure("convert: --output: " + target.string() + " is there already");
  }
  const fs::path parent = fs::absolute(target).lexically_normal().parent_path();
  if (!fs::is_directory(parent, error) || ::access(parent.c_str(), W_OK) != 0) {
    throw Failure("convert: --output: cannot write in " + parent.string());
  }
}

void write_model(const ShardedSafetensors& weights, const Json& config,
                 const std::vector<ReplacedLayer>& layers, const fs::path& target) {
  std::set<std::string> dropped;
  std::map<std::string, std::vector<const NamedTensor*>> added;  // by the file they go to
  for (const ReplacedLayer& layer : layers) {
    dropped.insert(layer.before.begin(), layer.before.end());
    for (const NamedTensor& tensor : layer.after) {
      added[weights.shard_of(layer.before.front())].push_back(&tensor);
    }
  }
  const HeldSignals held;
  NewFolder folder(target);
  Json map = Json::object();
  std::int64_t total = 0;
  for (const std::string& shard : weights.shards()) {
    std::vector<SafetensorsItem> items;
    std::vector<Tensor> loaded;  // what cannot be seen through the mapping
    for (const std::string& name : weights.names()) {
      if (weights.shard_of(name) != shard || dropped.contains(name)) continue;
      const SafetensorsEntry& entry = weights.entry(name);
      if (entry.dtype &&
          entry.file_offset % static_cast<std::uint64_t>(size_of(*entry.dtype)) != 0) {
        loaded.push_back(weights.load(name));
        items.push_back({name, loaded.back()});
      } else {
        items.push_back({name, weights.tensor(name)});
      }
    }
    for (const NamedTensor* const tensor : added[shard]) {
      items.push_back({tensor->name, tensor->value});
    }
    std::map<std::string, std::string> metadata;
    for (const std::string& name : weights.names()) {
      if (weights.shard_of(name) == shard) {
        metadata = weights.file_of(name).metadata();
        break;
      }
    }
    write_safetensors(folder.path() / shard, items, metadata);
    for (const SafetensorsItem& item : items) {
      map[item.name] = shard;
      total += item.view.num_elements() * static_cast<std::int64_t>(size_of(item.view.dtype()));
    }
  }
  if (fs::exists(weights.folder() / kIndex)) {
    const Json index = {{"metadata", {{"total_size", total}}}, {"weight_map", map}};
    write_text(folder.path() / kIndex, index.dump(2) + "\n");
  }
  write_text(folder.path() / "config.json", config.dump(2) + "\n");
  copy_other_files(weights.folder(), folder.path());
  folder.commit();
}

}  // namespace ladon::cli
