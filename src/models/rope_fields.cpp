#include "models/rope_fields.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <utility>

#include "core/checks.h"
#include "io/file.h"

namespace ladon::models {
namespace {

/// What is next to rope_scaling and rope_parameters, and counts where they say nothing.
struct Outside {
  std::optional<double> base;
  std::optional<double> original_context;
  std::optional<double> context;
  std::int64_t head_dim = 0;
  std::int64_t rope_context = 0;
};

/// The context before stretching: published files name it inside, outside, or not at all, and then
/// mean the model's own.
double original_context(ConfigFields& fields, const Outside& outside) {
  constexpr std::string_view kName = "original_max_position_embeddings";
  const auto inside = fields.optional_number(kName);
  if (inside) return *inside;
  if (outside.original_context) return *outside.original_context;
  if (outside.context) return *outside.context;
  fields.refuse(kName, "got none, expected a number here or as max_position_embeddings");
}

/// max_position_embeddings.
double needed_context(ConfigFields& fields, const Outside& outside) {
  if (outside.context) return *outside.context;
  fields.refuse("max_position_embeddings", "got none, expected a number next to the rope's");
}

/// The divisors of longrope, one for each pair.
std::vector<double> read_factors(ConfigFields& fields, std::string_view name) {
  const ConfigValue* const list = fields.optional_value(name);
  if (list == nullptr) fields.refuse(name, "got none, expected an array of numbers");
  if (list->kind != ConfigValue::Kind::kArray) {
    fields.refuse_kind(name, *list, "an array of numbers");
  }
  std::vector<double> factors;
  for (const ConfigValue& item : list->items) {
    if (item.kind != ConfigValue::Kind::kInteger && item.kind != ConfigValue::Kind::kNumber) {
      fields.refuse_kind(name, item, "numbers alone");
    }
    factors.push_back(item.number);
  }
  return factors;
}

/// A number where 0 too means the default.
double number_or(ConfigFields& fields, std::string_view name, double otherwise) {
  const double value = fields.number(name, otherwise);
  return value == 0 ? otherwise : value;
}

RopeScalingOptions read_scaling(ConfigFields& fields, const Outside& outside,
                                const std::string& kind) {
  if (kind == "default") return {};
  RopeScalingOptions scaling;
  if (kind == "linear") {
    scaling.kind = RopeScaling::kLinear;
    scaling.factor = fields.number("factor");
  } else if (kind == "llama3") {
    scaling.kind = RopeScaling::kLlama3;
    scaling.factor = fields.number("factor");
    scaling.low_frequency_factor = fields.number("low_freq_factor");
    scaling.high_frequency_factor = fields.number("high_freq_factor");
    scaling.original_context = original_context(fields, outside);
  } else if (kind == "yarn") {
    scaling.kind = RopeScaling::kYarn;
    scaling.factor = fields.number("factor");
    scaling.original_context = original_context(fields, outside);
    scaling.beta_fast = number_or(fields, "beta_fast", 32);
    scaling.beta_slow = number_or(fields, "beta_slow", 1);
    scaling.truncate = fields.flag("truncate", true);
    scaling.attention_factor = fields.optional_number("attention_factor");
    scaling.mscale = fields.number("mscale", 0);
    scaling.mscale_all_dim = fields.number("mscale_all_dim", 0);
  } else if (kind == "dynamic") {
    scaling.kind = RopeScaling::kDynamic;
    scaling.factor = fields.number("factor");
    // Hugging Face's code goes by max_position_embeddings, whatever else is named.
    fields.pass_over("original_max_position_embeddings");
    scaling.original_context = needed_context(fields, outside);
    scaling.context = outside.rope_context;
  } else if (kind == "longrope" || kind == "su") {
    scaling.kind = RopeScaling::kLongRope;
    scaling.original_context = original_context(fields, outside);
    const auto factor = fields.optional_number("factor");
    scaling.factor = factor ? *factor : needed_context(fields, outside) / scaling.original_context;
    scaling.attention_factor = fields.optional_number("attention_factor");
    scaling.short_factors = read_factors(fields, "short_factor");
    scaling.long_factors = read_factors(fields, "long_factor");
    scaling.context = outside.rope_context;
  } else {
    fields.refuse(fields.name_in_file("rope_type type"),
                  "got " + io::in_quotes(kind) +
                      ", expected default, linear, llama3, yarn, dynamic or longrope",
                  ErrorCode::kUnsupported);
  }
  return scaling;
}

/// Elements of a head that are rotated; 0 for all of them.
std::int64_t rotary_dim(ConfigFields& fields, std::string_view name, double fraction,
                        const RopeColumns& columns, std::int64_t head_dim) {
  if (fraction == 1) return 0;
  if (columns.fraction.empty()) {
    fields.refuse(name, "got " + text_of(fraction) + ", expected 1: Ladon does not honour it here",
                  ErrorCode::kUnsupported);
  }
  const double elements = std::floor(static_cast<double>(head_dim) * fraction);
  if (!(fraction > 0 && fraction < 1 && elements >= 2)) {
    fields.refuse(name, "got " + text_of(fraction) + " of heads of " + std::to_string(head_dim) +
                            ", expected a fraction that leaves a pair to rotate");
  }
  return static_cast<std::int64_t>(elements);
}

/// What is said outside of rope_parameters and rope_scaling.
struct Defaults {
  double base;
  double fraction;
};

RopeOptions read_parameters(ConfigFields& fields, const Outside& outside, const Defaults& defaults,
                            const RopeColumns& columns, std::span<const std::string> ignored) {
  RopeOptions rope;
  const auto base = fields.optional_number("rope_theta");
  if (base && outside.base && *base != *outside.base) {
    fields.refuse("rope_theta", "got " + text_of(*base) + ", expected " + text_of(*outside.base) +
                                    " as in the rope_theta next to it");
  }
  rope.base = base.value_or(outside.base.value_or(defaults.base));
  rope.rotary_dim = rotary_dim(fields, "partial_rotary_factor",
                               fields.number("partial_rotary_factor", defaults.fraction), columns,
                               outside.head_dim);
  rope.scaling =
      read_scaling(fields, outside, fields.optional_text("rope_type type").value_or("default"));
  fields.finish(ignored, /*only_attention=*/false);
  return rope;
}

bool is_layer_type(std::string_view name) {
  constexpr std::array<std::string_view, 2> kTypes = {"full_attention", "sliding_attention"};
  return std::find(kTypes.begin(), kTypes.end(), name) != kTypes.end();
}

}  // namespace

RopeOfType read_rope(ConfigFields& fields, const std::string& path, const RopeColumns& columns,
                     std::int64_t head_dim, std::int64_t context,
                     std::span<const std::string> ignored) {
  Outside outside{.base = fields.optional_number(columns.theta),
                  .original_context = fields.optional_number("original_max_position_embeddings"),
                  .context = fields.optional_number("max_position_embeddings"),
                  .head_dim = head_dim,
                  .rope_context = context};
  const std::string_view fraction_name =
      columns.fraction.empty() ? "partial_rotary_factor" : columns.fraction;
  const double fraction = fields.number(fraction_name, columns.default_fraction);
  const Defaults defaults{columns.base, fraction};
  const ConfigValue* const before = fields.optional_value("rope_scaling");
  const ConfigValue* const now = fields.optional_value("rope_parameters");
  if (before != nullptr && now != nullptr) {
    fields.refuse("rope_parameters", "got it together with rope_scaling, expected one of them");
  }
  RopeOfType result;
  // Windowed layers whose base is a separate field: their rope is a plain one.
  std::optional<double> base_of_windows;
  if (!columns.theta_of_windows.empty()) {
    base_of_windows = fields.optional_number(columns.theta_of_windows);
    if (now == nullptr) {
      result["sliding_attention"] = RopeOptions{.base = base_of_windows.value_or(10000)};
    }
  }
  const ConfigValue* const given = now != nullptr ? now : before;
  if (given == nullptr) {
    RopeOptions rope{.base = outside.base.value_or(columns.base)};
    rope.rotary_dim = rotary_dim(fields, fraction_name, fraction, columns, head_dim);
    result.emplace("", rope);
    return result;
  }
  const std::string name = now != nullptr ? "rope_parameters" : "rope_scaling";
  if (given->kind != ConfigValue::Kind::kObject) fields.refuse_kind(name, *given, "an object");

  const bool by_type = !given->fields.empty() &&
                       std::all_of(given->fields.begin(), given->fields.end(),
                                   [](const auto& field) { return is_layer_type(field.first); });
  if (!by_type) {
    ConfigFields inner(path, *given, name);
    result.emplace("", read_parameters(inner, outside, defaults, columns, ignored));
    return result;
  }
  for (const auto& [type, parameters] : given->fields) {
    std::string inside = name;
    inside.append(".").append(type);
    if (parameters.kind != ConfigValue::Kind::kObject) {
      fields.refuse_kind(inside, parameters, "an object");
    }
    ConfigFields inner(path, parameters, std::move(inside));
    Outside fields_outside = outside;
    if (type == "sliding_attention" && !columns.theta_of_windows.empty()) {
      fields_outside.base = base_of_windows;
    }
    result.emplace(type, read_parameters(inner, fields_outside, defaults, columns, ignored));
  }
  return result;
}

}  // namespace ladon::models
