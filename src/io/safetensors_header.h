// The header of a safetensors file: JSON text that names the tensors, read and checked.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "io/file.h"
#include "ladon/safetensors.h"

namespace ladon::io {

/// The format's own limit on a header's length, and ours on an index's.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

/// One of the format's element types.
struct SafetensorsType {
  std::string_view name;
  std::uint64_t bits;
  std::optional<DType> dtype;
};

/// All of them, from small elements to large: writers order tensors from the last to the first.
std::span<const SafetensorsType> safetensors_types() noexcept;

struct SafetensorsHeader {
  std::vector<SafetensorsEntry> entries;  // in the order of their bytes
  std::map<std::string, std::string> metadata;
};

/// Reads the header of the file and checks it against the file's size. Throws Error (kIo).
SafetensorsHeader read_safetensors_header(const InputFile& file);

}  // namespace ladon::io
