#include "models/config_document.h"

#include <cmath>
#include <limits>
#include <utility>

#include "core/checks.h"
#include "io/json_events.h"

namespace ladon::models {
namespace {

using io::in_quotes;

/// The largest published ones carry tens of thousands of class names and stay below 2 MiB.
constexpr std::uint64_t kMaxConfigBytes = std::uint64_t{16} << 20U;
/// Far above any model's: a list with an entry for each layer is the longest thing kept.
constexpr std::size_t kMaxKeptValues = 100'000;
/// ladon_latent.frequencies[layer] is the deepest thing read.
constexpr std::size_t kMaxKeptDepth = 4;

bool is_kept(std::string_view name) {
  return name == "rope_scaling" || name == "rope_parameters" || name == "layer_types" ||
         name == "ladon_latent";
}

class ConfigEvents final : public io::JsonEvents {
 public:
  explicit ConfigEvents(const io::InputFile& file) : JsonEvents(file) {}

  bool null() override { return add({}); }
  bool boolean(bool value) override {
    return add({.kind = ConfigValue::Kind::kBool, .boolean = value});
  }
  bool number_integer(number_integer_t value) override {
    return add({.kind = ConfigValue::Kind::kInteger,
                .integer = value,
                .number = static_cast<double>(value)});
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (value <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return number_integer(static_cast<std::int64_t>(value));
    }
    return add({.kind = ConfigValue::Kind::kNumber, .number = static_cast<double>(value)});
  }
  bool number_float(number_float_t value, const string_t&) override {
    return add({.kind = ConfigValue::Kind::kNumber, .number = value});
  }
  bool string(string_t& value) override {
    return add({.kind = ConfigValue::Kind::kText, .text = std::move(value)});
  }

  bool start_object(std::size_t) override { return open(ConfigValue::Kind::kObject); }
  bool start_array(std::size_t) override { return open(ConfigValue::Kind::kArray); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& name) override {
    if (passed_over_ == 0) name_ = std::move(name);
    return true;
  }

  ConfigValue take() { return std::move(root_); }

 protected:
  std::string_view document() const override { return "config"; }
  bool unexpected(const std::string& got) override {
    file().refuse("got " + got + ", expected JSON");
  }

 private:
  /// Puts a value where the text stands: into the innermost open object or array.
  ConfigValue* place(ConfigValue&& value) {
    if (++kept_ > kMaxKeptValues) {
      file().refuse("got more than " + std::to_string(kMaxKeptValues) +
                    " values, expected a model's config");
    }
    ConfigValue& parent = *open_.back();
    parent.empty = false;
    if (parent.kind == ConfigValue::Kind::kArray) {
      return &parent.items.emplace_back(std::move(value));
    }
    const auto [field, added] = parent.fields.try_emplace(name_, std::move(value));
    if (!added) file().refuse(in_quotes(name_) + ": got it twice, expected it once");
    return &field->second;
  }

  bool add(ConfigValue&& value) {
    if (passed_over_ == 0) {
      place(std::move(value));
    } else if (passed_over_ == 1 && unkept_ != nullptr) {
      unkept_->empty = false;
    }
    return true;
  }

  bool open(ConfigValue::Kind kind) {
    if (passed_over_ > 0) {
      if (passed_over_ == 1) unkept_->empty = false;
      ++passed_over_;
      return true;
    }
    if (open_.empty()) {
      root_.kind = kind;
      open_.push_back(&root_);
      return true;
    }
    const bool keep = open_.size() < kMaxKeptDepth && (open_.size() > 1 || is_kept(name_));
    ConfigValue* const value = place({.kind = kind});
    if (keep) {
      open_.push_back(value);
    } else {
      unkept_ = value;
      passed_over_ = 1;
    }
    return true;
  }

  bool close() {
    if (passed_over_ > 0) {
      --passed_over_;
    } else {
      open_.pop_back();
    }
    return true;
  }

  ConfigValue root_;
  // The open objects and arrays that are kept, outermost first. Nothing is added to one while a
  // value inside it is open, so the pointers hold.
  std::vector<ConfigValue*> open_;
  std::size_t passed_over_ = 0;  // how many that are not kept are open
  ConfigValue* unkept_ = nullptr;
  std::size_t kept_ = 0;
  std::string name_;
};

}  // namespace

std::string ConfigValue::to_string() const {
  switch (kind) {
    case Kind::kNull: return "null";
    case Kind::kBool: return boolean ? "true" : "false";
    case Kind::kInteger: return std::to_string(integer);
    case Kind::kNumber:
      // A whole number that the file writes with a point.
      return text_of(number) +
             (number == std::trunc(number) && std::abs(number) < 1e15 ? ".0" : "");
    case Kind::kText: return "the text " + in_quotes(text);
    case Kind::kArray: return empty ? "an empty array" : "an array";
    case Kind::kObject: return empty ? "an empty object" : "an object";
  }
  return {};
}

ConfigValue read_config(const std::filesystem::path& path) {
  const io::InputFile file(kConfigOperation, path);
  if (file.size() > kMaxConfigBytes) {
    file.refuse("got a config of " + std::to_string(file.size()) + " bytes, expected at most " +
                std::to_string(kMaxConfigBytes));
  }
  std::string text(static_cast<std::size_t>(file.size()), '\0');
  file.read_at(0, text.data(), text.size());
  ConfigEvents events(file);
  io::parse_json_object(file, text, "config", events);
  return events.take();
}

}  // namespace ladon::models
