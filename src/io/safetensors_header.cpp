#include "io/safetensors_header.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <limits>
#include <utility>

#include "io/json_events.h"

namespace ladon::io {
namespace {

constexpr std::uint64_t kLengthBytes = 8;
// NumPy's limit, which writers keep; without one a header of 100 MB could claim millions.
constexpr std::size_t kMaxFileRank = 64;

// The order is that of the reference implementation, which sorts tensors by it.
constexpr std::array kTypes = {
    SafetensorsType{"F4", 4, {}},
    SafetensorsType{"F6_E2M3", 6, {}},
    SafetensorsType{"F6_E3M2", 6, {}},
    SafetensorsType{"BOOL", 8, DType::kBool},
    SafetensorsType{"U8", 8, DType::kU8},
    SafetensorsType{"I8", 8, DType::kI8},
    SafetensorsType{"F8_E5M2", 8, {}},
    SafetensorsType{"F8_E4M3", 8, {}},
    SafetensorsType{"F8_E8M0", 8, {}},
    SafetensorsType{"F8_E4M3FNUZ", 8, {}},
    SafetensorsType{"F8_E5M2FNUZ", 8, {}},
    SafetensorsType{"I16", 16, DType::kI16},
    SafetensorsType{"U16", 16, DType::kU16},
    SafetensorsType{"F16", 16, DType::kF16},
    SafetensorsType{"BF16", 16, DType::kBF16},
    SafetensorsType{"I32", 32, DType::kI32},
    SafetensorsType{"U32", 32, DType::kU32},
    SafetensorsType{"F32", 32, DType::kF32},
    SafetensorsType{"C64", 64, {}},
    SafetensorsType{"F64", 64, DType::kF64},
    SafetensorsType{"I64", 64, DType::kI64},
    SafetensorsType{"U64", 64, DType::kU64},
};

std::string shape_text(const std::vector<std::int64_t>& shape) {
  std::string text = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) {
    if (i != 0) text += ", ";
    text += std::to_string(shape[i]);
  }
  return text + "]";
}

std::string range_text(std::uint64_t begin, std::uint64_t end) {
  return "[" + std::to_string(begin) + ", " + std::to_string(end) + "]";
}

/// Bytes of a tensor; none where they are not a whole number or cannot be counted. Sizes of 0 count
/// as 1 for the limit, so that the strides of what passes can be counted too.
std::optional<std::uint64_t> bytes_of(const std::vector<std::int64_t>& shape, std::uint64_t bits) {
  constexpr auto kMax = static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
  std::uint64_t total = bits;
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size == 0) {
      empty = true;
      continue;
    }
    const auto factor = static_cast<std::uint64_t>(size);
    if (total > kMax / factor) return std::nullopt;
    total *= factor;
  }
  if (empty) return 0;
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

/// Receives {"__metadata__": {text: text}, name: {"dtype": ..., "shape": ..., "data_offsets":
/// ...}}.
class HeaderEvents final : public JsonEvents {
 public:
  HeaderEvents(const InputFile& file, std::uint64_t data_begin)
      : JsonEvents(file), data_begin_(data_begin) {}

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kTop) {
      place_ = in_metadata_ ? Place::kMetadata : Place::kTensor;
    } else {
      return unexpected("an object");
    }
    return true;
  }

  bool key(string_t& name) override {
    if (place_ == Place::kTop) return top_key(name);
    if (place_ == Place::kMetadata) {
      metadata_key_ = name;
      if (header_.metadata.contains(name)) {
        file().refuse("__metadata__: got the key " + in_quotes(name) + " twice, expected it once");
      }
      return true;
    }
    return tensor_key(name);
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadata) {
      header_.metadata.emplace(std::move(metadata_key_), std::move(value));
      return true;
    }
    if (place_ != Place::kTensor || field_ != kDtype)
      return unexpected("the text " + in_quotes(value));
    const auto found = std::find_if(kTypes.begin(), kTypes.end(), [&](const SafetensorsType& type) {
      return type.name == value;
    });
    if (found == kTypes.end()) {
      refuse_tensor("got dtype " + in_quotes(value) + ", expected one of the format's");
    }
    type_ = &*found;
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ != Place::kTensor || field_ == kDtype) return unexpected("an array");
    place_ = Place::kArray;
    return true;
  }

  bool number_unsigned(number_unsigned_t value) override {
    if (place_ != Place::kArray) return unexpected(std::to_string(value));
    if (field_ == kShape) {
      if (shape_.size() == kMaxFileRank) {
        refuse_tensor("got more than 64 dimensions, expected at most 64");
      }
      if (!std::in_range<std::int64_t>(value)) {
        refuse_tensor("got a size of " + std::to_string(value) +
                      ", expected one that fits 63 bits");
      }
      shape_.push_back(static_cast<std::int64_t>(value));
    } else {
      if (num_offsets_ == offsets_.size()) {
        refuse_tensor("got more than two data_offsets, expected a begin and an end");
      }
      offsets_[num_offsets_++] = value;
    }
    return true;
  }

  bool end_array() override {
    place_ = Place::kTensor;
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) finish_tensor();
    in_metadata_ = false;
    place_ = Place::kTop;
    return true;
  }

  SafetensorsHeader take() { return std::move(header_); }

 protected:
  std::string_view document() const override { return "header"; }

  [[noreturn]] bool unexpected(const std::string& got) override {
    switch (place_) {
      case Place::kMetadata:
        file().refuse("__metadata__: got " + got + " for " + in_quotes(metadata_key_) +
                      ", expected a text");
      case Place::kArray:
        refuse_tensor("got " + got + " in " + std::string(kFieldNames[field_]) +
                      ", expected whole numbers");
      case Place::kTensor:
        refuse_tensor("got " + got + " for " + std::string(kFieldNames[field_]) + ", expected " +
                      (field_ == kDtype ? "a text" : "an array"));
      default: break;
    }
    if (in_metadata_) file().refuse("__metadata__: got " + got + ", expected an object of texts");
    refuse_tensor("got " + got + ", expected an object with dtype, shape and data_offsets");
  }

 private:
  enum class Place { kStart, kTop, kMetadata, kTensor, kArray };
  enum Field : std::size_t { kDtype, kShape, kOffsets };
  static constexpr std::array<std::string_view, 3> kFieldNames = {"dtype", "shape", "data_offsets"};

  [[noreturn]] void refuse_tensor(const std::string& what) const {
    file().refuse("tensor " + in_quotes(name_) + ": " + what);
  }

  bool top_key(string_t& name) {
    if (name == "__metadata__") {
      if (std::exchange(had_metadata_, true)) {
        file().refuse("got __metadata__ twice, expected it once");
      }
      in_metadata_ = true;
      return true;
    }
    name_ = std::move(name);
    seen_ = {};
    num_offsets_ = 0;
    shape_.clear();
    return true;
  }

  bool tensor_key(const string_t& name) {
    const auto found = std::find(kFieldNames.begin(), kFieldNames.end(), name);
    if (found == kFieldNames.end()) {
      refuse_tensor("got the field " + in_quotes(name) +
                    ", expected dtype, shape and data_offsets");
    }
    field_ = static_cast<Field>(found - kFieldNames.begin());
    if (std::exchange(seen_[field_], true)) {
      refuse_tensor("got " + name + " twice, expected it once");
    }
    return true;
  }

  void finish_tensor() {
    for (std::size_t field = 0; field < seen_.size(); ++field) {
      if (!seen_[field]) {
        refuse_tensor("got no " + std::string(kFieldNames[field]) +
                      ", expected dtype, shape and data_offsets");
      }
    }
    if (num_offsets_ != offsets_.size()) {
      refuse_tensor("got " + std::to_string(num_offsets_) +
                    " data_offsets, expected a begin and an end");
    }
    const auto [begin, end] = offsets_;
    const std::string what = std::string(type_->name) + " of shape " + shape_text(shape_);
    const std::optional<std::uint64_t> num_bytes = bytes_of(shape_, type_->bits);
    if (!num_bytes) {
      refuse_tensor("got " + what + ", expected a whole number of bytes that fits 64 bits");
    }
    const std::uint64_t data_size = file().size() - data_begin_;
    if (begin <= end && end - begin != *num_bytes) {
      refuse_tensor("got data_offsets " + range_text(begin, end) + " for " + what + ", expected " +
                    std::to_string(*num_bytes) + " bytes");
    }
    if (begin > end || end > data_size) {
      refuse_tensor("got data_offsets " + range_text(begin, end) +
                    ", expected a range within the file's " + std::to_string(data_size) +
                    " bytes of data");
    }
    shape_.shrink_to_fit();
    header_.entries.push_back({.name = std::move(name_),
                               .dtype_name = type_->name,
                               .dtype = type_->dtype,
                               .shape = std::move(shape_),
                               .file_offset = data_begin_ + begin,
                               .num_bytes = *num_bytes});
  }

  std::uint64_t data_begin_;
  SafetensorsHeader header_;
  Place place_ = Place::kStart;
  bool in_metadata_ = false;
  bool had_metadata_ = false;
  std::string metadata_key_;
  // The tensor that is being read.
  std::string name_;
  Field field_ = kDtype;
  std::array<bool, 3> seen_{};
  const SafetensorsType* type_ = nullptr;
  std::vector<std::int64_t> shape_;
  std::array<std::uint64_t, 2> offsets_{};
  std::size_t num_offsets_ = 0;
};

/// No holes and no overlaps: every byte of the data belongs to one tensor. Anything else could hide
/// another file in this one, or make a small file unfold into a large one.
void check_layout(const InputFile& file, std::uint64_t data_begin,
                  const std::vector<SafetensorsEntry>& entries) {
  std::uint64_t expected = data_begin;
  for (const SafetensorsEntry& entry : entries) {
    if (entry.file_offset != expected) {
      file.refuse("tensor " + in_quotes(entry.name) + ": got data that begins at byte " +
                  std::to_string(entry.file_offset - data_begin) + ", expected " +
                  std::to_string(expected - data_begin) +
                  (entry.file_offset < expected ? " (it overlaps the tensor before it)"
                                                : " (nothing describes the bytes before it)"));
    }
    expected += entry.num_bytes;
  }
  if (expected != file.size()) {
    file.refuse("got " + std::to_string(file.size() - data_begin) + " bytes of data, expected " +
                std::to_string(expected - data_begin) + " by the header");
  }
}

void check_names_differ(const InputFile& file, const std::vector<SafetensorsEntry>& entries) {
  std::vector<std::string_view> names;
  names.reserve(entries.size());
  for (const SafetensorsEntry& entry : entries) names.emplace_back(entry.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    file.refuse("tensor " + in_quotes(*twice) + ": got it twice, expected it once");
  }
}

}  // namespace

std::span<const SafetensorsType> safetensors_types() noexcept { return kTypes; }

SafetensorsHeader read_safetensors_header(const InputFile& file) {
  if (file.size() < kLengthBytes) {
    file.refuse("got " + std::to_string(file.size()) +
                " bytes, expected 8 or more: the header's length stands there");
  }
  static_assert(std::endian::native == std::endian::little);
  std::uint64_t length = 0;
  file.read_at(0, &length, sizeof length);
  if (length > kMaxHeaderBytes) {
    file.refuse("got a header of " + std::to_string(length) + " bytes, expected at most " +
                std::to_string(kMaxHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    file.refuse("got a header of " + std::to_string(length) + " bytes, expected at most the " +
                std::to_string(file.size() - kLengthBytes) + " that the file has left");
  }
  std::string text(static_cast<std::size_t>(length), '\0');
  file.read_at(kLengthBytes, text.data(), text.size());

  HeaderEvents events(file, kLengthBytes + length);
  parse_json_object(file, text, "header", events);
  SafetensorsHeader header = events.take();
  check_names_differ(file, header.entries);
  // Stable: tensors without bytes keep the order in which they are named.
  std::stable_sort(header.entries.begin(), header.entries.end(),
                   [](const SafetensorsEntry& a, const SafetensorsEntry& b) {
                     return std::pair(a.file_offset, a.num_bytes) <
                            std::pair(b.file_offset, b.num_bytes);
                   });
  check_layout(file, kLengthBytes + length, header.entries);
  return header;
}

}  // namespace ladon::io
