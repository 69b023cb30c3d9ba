#include "ladon/safetensors.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <utility>

#include "io/elements.h"
#include "io/file.h"
#include "io/safetensors_header.h"

namespace ladon {

using io::in_quotes;

class SafetensorsFile::Impl {
 public:
  explicit Impl(const std::filesystem::path& path)
      : file("SafetensorsFile", path),
        header(io::read_safetensors_header(file)),
        mapping(file.map()),
        by_name(header.entries.size()) {
    std::iota(by_name.begin(), by_name.end(), std::size_t{0});
    std::sort(by_name.begin(), by_name.end(), [this](std::size_t a, std::size_t b) {
      return header.entries[a].name < header.entries[b].name;
    });
  }

  /// Null when there is none.
  const SafetensorsEntry* find(std::string_view name) const noexcept {
    const auto found = std::lower_bound(by_name.begin(), by_name.end(), name,
                                        [this](std::size_t index, std::string_view wanted) {
                                          return header.entries[index].name < wanted;
                                        });
    if (found == by_name.end() || header.entries[*found].name != name) return nullptr;
    return &header.entries[*found];
  }

  const SafetensorsEntry& at(std::string_view name) const {
    const SafetensorsEntry* const entry = find(name);
    if (entry == nullptr) {
      file.refuse("tensor " + in_quotes(name) + ": got none, expected it among the file's " +
                  std::to_string(header.entries.size()) + " tensors");
    }
    return *entry;
  }

  /// What Ladon has no tensor for is refused here.
  std::pair<DType, Dims> type_and_shape(const SafetensorsEntry& entry) const {
    if (!entry.dtype) {
      file.refuse("tensor " + in_quotes(entry.name) + ": got dtype " +
                      std::string(entry.dtype_name) +
                      ", which is not supported, expected F64, F32, F16, BF16, BOOL or an integer",
                  ErrorCode::kUnsupported);
    }
    if (entry.shape.size() > static_cast<std::size_t>(kMaxRank)) {
      file.refuse("tensor " + in_quotes(entry.name) + ": got " +
                      std::to_string(entry.shape.size()) + " dimensions, expected at most " +
                      std::to_string(kMaxRank),
                  ErrorCode::kUnsupported);
    }
    return {*entry.dtype, Dims(entry.shape)};
  }

  io::InputFile file;
  io::SafetensorsHeader header;
  io::Mapping mapping;
  // Indices of entries in the order of their names. Sorted and not hashed: a hostile file could
  // choose names that collide.
  std::vector<std::size_t> by_name;
};

SafetensorsFile::SafetensorsFile(std::unique_ptr<const Impl> impl) noexcept
    : impl_(std::move(impl)) {}
SafetensorsFile::~SafetensorsFile() = default;
SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept = default;
SafetensorsFile& SafetensorsFile::operator=(SafetensorsFile&& other) noexcept = default;

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  try {
    return SafetensorsFile(std::make_unique<const Impl>(path));
  } catch (const std::bad_alloc&) {
    fail(ErrorCode::kOutOfMemory, "SafetensorsFile", path.string(),
         "got a header whose tensors do not fit the memory, expected a smaller one");
  }
}

const std::filesystem::path& SafetensorsFile::path() const noexcept { return impl_->file.path(); }

std::span<const SafetensorsEntry> SafetensorsFile::entries() const noexcept {
  return impl_->header.entries;
}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  names.reserve(impl_->header.entries.size());
  for (const SafetensorsEntry& entry : impl_->header.entries) names.push_back(entry.name);
  return names;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const noexcept {
  return impl_->header.metadata;
}

bool SafetensorsFile::has(std::string_view name) const noexcept {
  return impl_->find(name) != nullptr;
}

const SafetensorsEntry& SafetensorsFile::entry(std::string_view name) const {
  return impl_->at(name);
}

ConstTensorView SafetensorsFile::tensor(std::string_view name) const& {
  const SafetensorsEntry& entry = impl_->at(name);
  const auto [dtype, shape] = impl_->type_and_shape(entry);
  // The mapping begins at a page, so the offset decides.
  if (entry.num_bytes != 0 && entry.file_offset % size_of(dtype) != 0) {
    impl_->file.refuse("tensor " + in_quotes(name) + ": got data at byte " +
                           std::to_string(entry.file_offset) + " of the file, expected a multiple" +
                           " of " + std::to_string(size_of(dtype)) + " (load() copies it)",
                       ErrorCode::kUnsupported);
  }
  return {impl_->mapping.data() + entry.file_offset, dtype, shape};
}

Tensor SafetensorsFile::load(std::string_view name) const {
  const SafetensorsEntry& entry = impl_->at(name);
  const auto [dtype, shape] = impl_->type_and_shape(entry);
  return io::read_elements(impl_->file, entry.file_offset, dtype, shape, dtype);
}

Tensor SafetensorsFile::load(std::string_view name, DType dtype) const {
  const SafetensorsEntry& entry = impl_->at(name);
  const auto [stored, shape] = impl_->type_and_shape(entry);
  return io::read_elements(impl_->file, entry.file_offset, stored, shape, dtype);
}

}  // namespace ladon
