// A model folder's config.json, read and held as far as it can concern attention.
//
// The file is not trusted: its size, its JSON, doubled names and the amount that is kept have
// limits. Single values at the top are kept, and the few lists and objects that families read;
// of all others only whether they are empty.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace ladon::models {

/// The operation that messages about a config begin with.
inline constexpr std::string_view kConfigOperation = "describe_model";

struct ConfigValue {
  enum class Kind : std::uint8_t { kNull, kBool, kInteger, kNumber, kText, kArray, kObject };
  using Fields = std::map<std::string, ConfigValue, std::less<>>;

  Kind kind = Kind::kNull;
  bool boolean = false;
  std::int64_t integer = 0;
  double number = 0;  // of integers too
  std::string text{};
  bool empty = true;  // arrays and objects, kept or not
  std::vector<ConfigValue> items{};
  Fields fields{};

  bool is_null() const noexcept { return kind == Kind::kNull; }
  /// As messages show it: "true", "12", "the text \"x\"", "an array".
  std::string to_string() const;
};

/// The object that the file holds. Throws Error (kIo).
ConfigValue read_config(const std::filesystem::path& path);

}  // namespace ladon::models
