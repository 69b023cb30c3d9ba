#include "models/config_fields.h"

#include <algorithm>
#include <array>
#include <utility>

#include "core/fail.h"
#include "io/file.h"

namespace ladon::models {
namespace {

using Kind = ConfigValue::Kind;

/// Calls with each word of a list, until one call returns true.
template <class Call>
bool any_word(std::string_view list, Call&& call) {
  while (!list.empty()) {
    const std::size_t end = std::min(list.find(' '), list.size());
    if (end > 0 && call(list.substr(0, end))) return true;
    list.remove_prefix(std::min(end + 1, list.size()));
  }
  return false;
}

/// Parts of names that attention's settings have had in published models. A field with one of them
/// that was not read is refused: better a false alarm than a wrong layer.
constexpr std::array<std::string_view, 26> kAttentionWords = {
    "attn",  "attention", "head",  "rope",       "rotary",       "window", "sliding",
    "alibi", "qk",        "query", "key",        "value",        "kv",     "bias",
    "scal",  "softcap",   "sink",  "mask",       "cross",        "causal", "sparse",
    "local", "global",    "logn",  "layer_type", "bidirectional"};

bool may_concern_attention(std::string_view name) {
  return name.find("position") != std::string_view::npos ||
         std::any_of(kAttentionWords.begin(), kAttentionWords.end(), [&](std::string_view word) {
           return name.find(word) != std::string_view::npos;
         });
}

bool same(const ConfigValue& a, const ConfigValue& b) {
  const auto is_number = [](const ConfigValue& value) {
    return value.kind == Kind::kInteger || value.kind == Kind::kNumber;
  };
  if (is_number(a) && is_number(b)) return a.number == b.number;
  return a.kind == b.kind && a.boolean == b.boolean && a.text == b.text && a.empty && b.empty;
}

}  // namespace

bool has_word(std::string_view list, std::string_view word) {
  return any_word(list, [&](std::string_view each) { return each == word; });
}

ConfigFields::ConfigFields(std::string path, const ConfigValue& object, std::string inside)
    : path_(std::move(path)), object_(object), inside_(std::move(inside)) {}

bool ConfigFields::has(std::string_view names) const {
  return any_word(names, [&](std::string_view name) { return object_.fields.contains(name); });
}

void ConfigFields::refuse(std::string_view field, std::string_view what, ErrorCode code) const {
  std::string argument = path_ + ": ";
  if (!inside_.empty()) argument += inside_ + ".";
  fail(code, kConfigOperation, argument.append(field), what);
}

void ConfigFields::refuse_kind(std::string_view field, const ConfigValue& value,
                               std::string_view expected) const {
  refuse(field, "got " + value.to_string() + ", expected " + std::string(expected));
}

std::string_view ConfigFields::name_in_file(std::string_view names) const {
  std::string_view found = names.substr(0, names.find(' '));
  any_word(names, [&](std::string_view name) {
    if (!object_.fields.contains(name)) return false;
    found = name;
    return true;
  });
  return found;
}

const ConfigValue* ConfigFields::find(std::string_view names) {
  const ConfigValue* value = nullptr;
  std::string_view first;
  any_word(names, [&](std::string_view name) {
    seen_.emplace(name);
    const auto field = object_.fields.find(name);
    if (field == object_.fields.end() || field->second.is_null()) return false;
    if (value == nullptr) {
      value = &field->second;
      first = name;
    } else if (!same(*value, field->second)) {
      refuse(name, "got " + field->second.to_string() + ", expected " + value->to_string() +
                       " as in " + std::string(first));
    }
    return false;
  });
  return value;
}

const ConfigValue* ConfigFields::optional_value(std::string_view names) { return find(names); }

std::optional<std::int64_t> ConfigFields::optional_size(std::string_view names,
                                                        std::int64_t limit) {
  const ConfigValue* const value = find(names);
  if (value == nullptr) return {};
  if (value->kind != Kind::kInteger || value->integer < 1 || value->integer > limit) {
    refuse_kind(name_in_file(names), *value, "a whole number from 1 to " + std::to_string(limit));
  }
  return value->integer;
}

std::int64_t ConfigFields::size(std::string_view names, std::int64_t limit) {
  const auto value = optional_size(names, limit);
  if (!value) {
    refuse(name_in_file(names),
           "got none, expected a whole number from 1 to " + std::to_string(limit));
  }
  return *value;
}

bool ConfigFields::flag(std::string_view names, bool otherwise) {
  const ConfigValue* const value = find(names);
  if (value == nullptr) return otherwise;
  if (value->kind != Kind::kBool) refuse_kind(name_in_file(names), *value, "true or false");
  return value->boolean;
}

std::optional<double> ConfigFields::optional_number(std::string_view names) {
  const ConfigValue* const value = find(names);
  if (value == nullptr) return {};
  if (value->kind != Kind::kInteger && value->kind != Kind::kNumber) {
    refuse_kind(name_in_file(names), *value, "a number");
  }
  return value->number;
}

double ConfigFields::number(std::string_view names) {
  const auto value = optional_number(names);
  if (!value) refuse(name_in_file(names), "got none, expected a number");
  return *value;
}

double ConfigFields::number(std::string_view names, double otherwise) {
  return optional_number(names).value_or(otherwise);
}

std::optional<std::string> ConfigFields::optional_text(std::string_view names) {
  const ConfigValue* const value = find(names);
  if (value == nullptr) return {};
  if (value->kind != Kind::kText) refuse_kind(name_in_file(names), *value, "a text");
  return value->text;
}

void ConfigFields::require_off(std::string_view names, std::span<const std::string> ignored) {
  any_word(names, [&](std::string_view name) {
    const ConfigValue* const value = find(name);
    if (value == nullptr || (value->kind == Kind::kBool && !value->boolean)) return false;
    if ((value->kind == Kind::kArray || value->kind == Kind::kObject) && value->empty) return false;
    if (std::find(ignored.begin(), ignored.end(), name) != ignored.end()) return false;
    refuse(name,
           "got " + value->to_string() +
               ", expected it to be off: Ladon does not honour it (name "
               "it in ignored_fields if it makes no difference)",
           ErrorCode::kUnsupported);
  });
}

void ConfigFields::pass_over(std::string_view names) {
  any_word(names, [&](std::string_view name) {
    seen_.emplace(name);
    return false;
  });
}

void ConfigFields::finish(std::span<const std::string> ignored, bool only_attention) const {
  for (const auto& [name, value] : object_.fields) {
    if (value.is_null() || seen_.contains(name)) continue;
    if (only_attention && !may_concern_attention(name)) continue;
    const std::string whole = inside_.empty() ? name : inside_ + "." + name;
    if (std::find(ignored.begin(), ignored.end(), whole) != ignored.end()) continue;
    // The name is the file's: not to be printed as it stands.
    const std::string shown = io::in_quotes(whole);
    fail(ErrorCode::kUnsupported, kConfigOperation, path_ + ": " + shown,
         "got " + value.to_string() +
             ", expected only fields that Ladon knows where they may concern attention (name it in "
             "ignored_fields if it does not)");
  }
}

}  // namespace ladon::models
