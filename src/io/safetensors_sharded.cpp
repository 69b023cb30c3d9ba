#include <mutex>
#include <new>
#include <system_error>
#include <utility>

#include "core/fork_safe_mutex.h"
#include "io/file.h"
#include "io/json_events.h"
#include "io/safetensors_header.h"
#include "ladon/safetensors.h"

namespace ladon {
namespace {

using io::in_quotes;

constexpr std::string_view kOperation = "ShardedSafetensors";
constexpr const char* kSingleName = "model.safetensors";
constexpr const char* kIndexName = "model.safetensors.index.json";

using WeightMap = std::map<std::string, std::string, std::less<>>;

/// Receives {"weight_map": {tensor: file}, ...}. What else stands at the top ("metadata") is of any
/// shape and passed over.
class IndexEvents final : public io::JsonEvents {
 public:
  explicit IndexEvents(const io::InputFile& file) : JsonEvents(file) {}

  bool start_object(std::size_t) override { return open(true); }
  bool start_array(std::size_t) override { return open(false); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (depth_ == 1) {
      in_map_ = name == "weight_map";
      if (in_map_ && std::exchange(has_map_, true)) {
        file().refuse("got weight_map twice, expected it once");
      }
    } else if (in_map_) {
      name_ = std::move(name);
    }
    return true;
  }

  bool string(string_t& value) override {
    if (!in_map_ || depth_ != 2) return unexpected("the text " + in_quotes(value));
    // A name with a folder in it could lead anywhere.
    if (value.empty() || value == "." || value == ".." ||
        value.find_first_of(std::string_view("/\\\0", 3)) != std::string::npos) {
      file().refuse("tensor " + in_quotes(name_) + ": got the shard " + in_quotes(value) +
                    ", expected the name of a file in the same folder");
    }
    const auto [entry, added] = map_.try_emplace(std::move(name_), std::move(value));
    if (!added) {
      file().refuse("tensor " + in_quotes(entry->first) +
                    ": got it twice in weight_map, expected it once");
    }
    return true;
  }

  WeightMap take() {
    if (!has_map_) file().refuse("got no weight_map, expected one");
    return std::move(map_);
  }

 protected:
  std::string_view document() const override { return "index"; }

  bool unexpected(const std::string& got) override {
    if (!in_map_) return true;
    file().refuse(depth_ == 1 ? "got " + got + " for weight_map, expected an object"
                              : "tensor " + in_quotes(name_) + ": got " + got +
                                    ", expected a shard's name");
  }

 private:
  bool open(bool is_object) {
    if (in_map_ && (depth_ != 1 || !is_object)) unexpected(is_object ? "an object" : "an array");
    ++depth_;
    return true;
  }
  bool close() {
    --depth_;
    return true;
  }

  WeightMap map_;
  std::string name_;
  std::size_t depth_ = 0;
  bool in_map_ = false;
  bool has_map_ = false;
};

WeightMap read_index(const std::filesystem::path& path) {
  const io::InputFile file(kOperation, path);
  if (file.size() > io::kMaxHeaderBytes) {
    file.refuse("got an index of " + std::to_string(file.size()) + " bytes, expected at most " +
                std::to_string(io::kMaxHeaderBytes));
  }
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_at(0, text.data(), text.size());
  IndexEvents events(file);
  io::parse_json_object(file, text, "index", events);
  return events.take();
}

bool is_there(const std::filesystem::path& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

}  // namespace

class ShardedSafetensors::Impl {
 public:
  explicit Impl(const std::filesystem::path& folder_path) : folder(folder_path) {
    if (is_there(folder / kSingleName)) {
      auto file = std::make_unique<SafetensorsFile>(SafetensorsFile::open(folder / kSingleName));
      for (std::string& name : file->names()) map.emplace(std::move(name), kSingleName);
      opened_.emplace(kSingleName, std::move(file));
    } else if (is_there(folder / kIndexName)) {
      map = read_index(folder / kIndexName);
      for (const auto& [name, shard] : map) opened_.try_emplace(shard);
    } else {
      fail(ErrorCode::kIo, kOperation, folder.string(),
           std::string("got neither ") + kSingleName + " nor " + kIndexName +
               ", expected a folder with one of them");
    }
  }

  const std::string& shard_of(std::string_view name) const {
    const auto found = map.find(name);
    if (found == map.end()) {
      fail(ErrorCode::kIo, kOperation, folder.string(),
           "tensor " + in_quotes(name) + ": got none, expected it among the folder's " +
               std::to_string(map.size()) + " tensors");
    }
    return found->second;
  }

  const SafetensorsFile& file_of(std::string_view name) const {
    const std::string& shard = shard_of(name);
    const std::lock_guard lock(mutex_);
    std::unique_ptr<const SafetensorsFile>& slot = opened_.find(shard)->second;
    if (slot == nullptr) {
      auto file = std::make_unique<const SafetensorsFile>(SafetensorsFile::open(folder / shard));
      check_against_index(shard, *file);
      slot = std::move(file);
    }
    return *slot;
  }

  std::vector<std::string> shards() const {
    // The files come and go in opened_, their names do not: no lock.
    std::vector<std::string> names;
    names.reserve(opened_.size());
    for (const auto& [shard, file] : opened_) names.push_back(shard);
    return names;
  }

  std::filesystem::path folder;
  WeightMap map;

 private:
  void check_against_index(const std::string& shard, const SafetensorsFile& file) const {
    const std::string path = (folder / shard).string();
    for (const auto& [name, place] : map) {
      if (place != shard) continue;
      if (!file.has(name)) {
        fail(ErrorCode::kIo, kOperation, path,
             "tensor " + in_quotes(name) + ": got none, expected it in this shard by the index");
      }
    }
    for (const SafetensorsEntry& entry : file.entries()) {
      const auto found = map.find(entry.name);
      if (found != map.end() && found->second != shard) {
        fail(ErrorCode::kIo, kOperation, path,
             "tensor " + in_quotes(entry.name) + ": got it in this shard, expected it in " +
                 in_quotes(found->second) + " alone by the index");
      }
    }
  }

  mutable ForkSafeMutex mutex_;
  mutable std::map<std::string, std::unique_ptr<const SafetensorsFile>> opened_;
};

ShardedSafetensors::ShardedSafetensors(std::unique_ptr<const Impl> impl) noexcept
    : impl_(std::move(impl)) {}
ShardedSafetensors::~ShardedSafetensors() = default;
ShardedSafetensors::ShardedSafetensors(ShardedSafetensors&& other) noexcept = default;
ShardedSafetensors& ShardedSafetensors::operator=(ShardedSafetensors&& other) noexcept = default;

ShardedSafetensors ShardedSafetensors::open(const std::filesystem::path& folder) {
  try {
    return ShardedSafetensors(std::make_unique<const Impl>(folder));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kOutOfMemory, kOperation, folder.string(),
         "got an index whose tensors do not fit the memory, expected a smaller one");
  }
}

const std::filesystem::path& ShardedSafetensors::folder() const noexcept { return impl_->folder; }

std::vector<std::string> ShardedSafetensors::names() const {
  std::vector<std::string> names;
  names.reserve(impl_->map.size());
  for (const auto& [name, shard] : impl_->map) names.push_back(name);
  return names;
}

std::vector<std::string> ShardedSafetensors::shards() const { return impl_->shards(); }

bool ShardedSafetensors::has(std::string_view name) const noexcept {
  return impl_->map.find(name) != impl_->map.end();
}

const std::string& ShardedSafetensors::shard_of(std::string_view name) const {
  return impl_->shard_of(name);
}

const SafetensorsFile& ShardedSafetensors::file_of(std::string_view name) const& {
  return impl_->file_of(name);
}

const SafetensorsEntry& ShardedSafetensors::entry(std::string_view name) const& {
  return impl_->file_of(name).entry(name);
}

ConstTensorView ShardedSafetensors::tensor(std::string_view name) const& {
  return impl_->file_of(name).tensor(name);
}

Tensor ShardedSafetensors::load(std::string_view name) const {
  return impl_->file_of(name).load(name);
}

Tensor ShardedSafetensors::load(std::string_view name, DType dtype) const {
  return impl_->file_of(name).load(name, dtype);
}

}  // namespace ladon
