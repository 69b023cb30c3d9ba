// The fields of a config by name and type. The reader of a family's config requests what it
// honours; what was never requested is looked at in the end, so that nothing about attention is
// passed over.
#pragma once

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>

#include "ladon/error.h"
#include "models/config_document.h"

namespace ladon::models {

/// Whether a list of words with spaces between them has this one.
bool has_word(std::string_view list, std::string_view word);

/// One object of a config. Names are given as a list with spaces where a field has several
/// ("hidden_size n_embd"): those that are there must agree. Null counts as absent, unless stated.
class ConfigFields {
 public:
  /// `path` is the file's, `inside` the name of the object in it ("" for the whole).
  ConfigFields(std::string path, const ConfigValue& object, std::string inside = {});

  /// Present, null or not.
  bool has(std::string_view names) const;

  /// Counts and widths: whole numbers from 1 to `limit`.
  std::int64_t size(std::string_view names, std::int64_t limit);
  std::optional<std::int64_t> optional_size(std::string_view names, std::int64_t limit);
  bool flag(std::string_view names, bool otherwise);
  double number(std::string_view names);
  double number(std::string_view names, double otherwise);
  std::optional<double> optional_number(std::string_view names);
  std::optional<std::string> optional_text(std::string_view names);
  /// A value of any kind; null pointer where it is absent or null.
  const ConfigValue* optional_value(std::string_view names);

  /// Refuses fields that change attention in a way that Ladon does not honour, unless they are off:
  /// absent, null, false or empty. Those that the caller vouches for are in `ignored`.
  void require_off(std::string_view names, std::span<const std::string> ignored);
  /// From now on a field that need not be read.
  void pass_over(std::string_view names);
  /// Refuses the fields that were neither read nor passed over. `only_attention`: only those whose
  /// name could concern attention.
  void finish(std::span<const std::string> ignored, bool only_attention) const;

  /// Throws Error with "describe_model: path: field: what".
  [[noreturn]] void refuse(std::string_view field, std::string_view what,
                           ErrorCode code = ErrorCode::kIo) const;
  [[noreturn]] void refuse_kind(std::string_view field, const ConfigValue& value,
                                std::string_view expected) const;
  /// The name by which a field of several names is there; the first where it is absent.
  std::string_view name_in_file(std::string_view names) const;

 private:
  /// The value under any of the names, marked as read; null pointer where there is none.
  const ConfigValue* find(std::string_view names);

  std::string path_;
  const ConfigValue& object_;
  std::string inside_;
  std::set<std::string, std::less<>> seen_;
};

}  // namespace ladon::models
